"""What heads are given, and what they make of it, is what transformers and the training say."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from conch.model.attention import PagedStep
from conch.model.choosing import load_model
from conch.model.eagle.fused import FusedHead
from conch.model.eagle.head import build_head
from conch.model.eagle.parts import read_head
from conch.model.eagle.plain import PlainHead
from conch.model.eagle.slots import Given
from conch.training.head import HeadShape, TrainableHead
from conch.worker.state_head import head_spec
from support.eagle import (
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    SIZE,
    eagle1_config,
    eagle1_tensors,
    eagle3_config,
    eagle3_tensors,
    write_head,
)
from support.model_steps import batch, by_transformers, nothing, parts, pools
from support.tiny import tiny_checkpoint

TOKENS = [5, 9, 100, 31, 7, 7, 200, 3, 18, 44, 45, 46]


@pytest.mark.parametrize("kernel_name", ["cpu", "torch"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2"])
@pytest.mark.parametrize("layers", [(0,), (1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("wanted", [[], [11], [9, 10, 11]])
def test_kept_states_are_those_of_transformers(kernel_name, family, layers, wanted):
    prepared, build = parts(kernel_name, family)
    kernel = build(prepared.spec)
    model = load_model(prepared.description, prepared.config, kernel, nothing)
    kept = model.keep_states(layers)
    all_logits, states = by_transformers(tiny_checkpoint(family), TOKENS, layers)
    with torch.inference_mode():
        step = batch(0, len(TOKENS), TOKENS, wanted)
        logits = model.logits(
            step, PagedStep(kernel, kernel.plan(step), pools(kernel, prepared.spec.num_layers))
        )
    torch.testing.assert_close(kept.values, states, atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(logits.values, all_logits[wanted], atol=2e-3, rtol=1e-3)


def built(kernel_name, folder, **changes):
    """Return a head of the make that goes with the kernel, its kernel and its weights."""
    prepared, build = parts(kernel_name, **changes)
    layout, weights = read_head(folder, prepared.description)
    assert (layout.heads, layout.kv_heads) == (HEADS, KV_HEADS)
    spec = head_spec(layout, prepared.spec)
    kernel = build(spec)
    head = build_head(layout, weights, kernel, spec)
    assert isinstance(head, FusedHead if kernel_name == "cpu" else PlainHead)
    return head, kernel, weights


def drafted(head, kernel, given, step, kv):
    return head.run(step, Given(given), PagedStep(kernel, kernel.plan(step), kv))


@pytest.mark.parametrize("kernel_name", ["cpu", "torch"])
def test_a_head_drafts_as_it_was_trained_to(kernel_name):
    """Depth d of the training, at the last slot, is the d-th draft of a chain."""
    torch.manual_seed(4)
    shape = HeadShape(HIDDEN, INNER, HEADS, KV_HEADS, SIZE, 10000.0, 1e-6, num_states=2)
    trained = TrainableHead(shape)
    head, kernel, weights = built(kernel_name, write_head(dict(trained.state_dict()), eagle3_config()))
    states = torch.randn(1, len(TOKENS), 2 * HIDDEN)
    kv = pools(kernel, 1)
    with torch.inference_mode():
        unrolling = trained.begin(states[:, :-1])
        embedded = functional.embedding(torch.tensor([TOKENS[1:]]), weights.embedding)
        depths = [unrolling.next(embedded)[0] @ weights.logits.T for _ in range(3)]
        computed = len(TOKENS) - 3  # the last two slots are drafts
        step = batch(0, computed, TOKENS[1 : computed + 1], range(computed))
        slots = drafted(head, kernel, states[0, :computed].unflatten(-1, (2, HIDDEN)), step, kv)
        torch.testing.assert_close(slots.logits, depths[0][:computed], atol=1e-4, rtol=1e-3)
        for ahead in (1, 2):
            slot = computed + ahead - 1
            step = batch(slot, 1, [TOKENS[slot + 1]], [0])
            slots = drafted(head, kernel, slots.outputs[-1:], step, kv)
            torch.testing.assert_close(slots.logits, depths[ahead][slot : slot + 1], atol=1e-4, rtol=1e-3)


LAYOUTS = {
    "EAGLE-3": (eagle3_tensors, eagle3_config()),
    "EAGLE-3, residual normed": (eagle3_tensors, eagle3_config(norm_before_residual=True)),
    "EAGLE-1": (eagle1_tensors, eagle1_config()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fused_head_is_the_plain_one(layout):
    """A prompt in two chunks, one without logits, then two slots of the head's own outputs."""
    tensors, config = LAYOUTS[layout]
    folder = write_head(tensors(), config)
    torch.manual_seed(9)
    states = torch.randn(len(TOKENS), 1 if layout == "EAGLE-1" else 2, HIDDEN)
    found = []
    with torch.inference_mode():
        for kernel_name in ("cpu", "torch"):
            head, kernel, _ = built(kernel_name, folder)
            kv = pools(kernel, 1)
            empty = drafted(head, kernel, states[:5], batch(0, 5, TOKENS[:5], []), kv)
            assert len(empty.outputs) == len(empty.logits) == 0
            slots = drafted(head, kernel, states[5:], batch(5, 7, TOKENS[5:], [5, 6]), kv)
            made = [slots.outputs.clone(), slots.logits.clone()]
            for slot in (12, 13):
                slots = drafted(head, kernel, slots.outputs[-1:], batch(slot, 1, [TOKENS[slot - 9]], [0]), kv)
                made += [slots.outputs.clone(), slots.logits.clone()]
            found.append(made)
    for fused, plain in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, atol=1e-4, rtol=1e-3)
    assert found[0][1].isfinite().sum() > 100
