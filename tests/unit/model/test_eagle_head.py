"""What heads are given, and what they make of it, is what transformers and the training say."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from conch.api import BuildContext, EngineConfig, StepBatch
from conch.engine.catalogue import Catalogue
from conch.model.attention import PagedStep
from conch.model.choosing import load_model
from conch.model.eagle.head import EagleHead
from conch.model.eagle.parts import read_head
from conch.training.head import HeadShape, TrainableHead
from conch.worker import prepare
from support.eagle import HEADS, HIDDEN, INNER, KV_HEADS, SIZE, eagle3_config, write_head
from support.oracle import Oracle
from support.tiny import tiny_checkpoint

TOKENS = [5, 9, 100, 31, 7, 7, 200, 3, 18, 44, 45, 46]
BLOCK = 16


def nothing(*_):
    pass


def parts(kernel, family="llama", **changes):
    config = EngineConfig(
        model=str(tiny_checkpoint(family, **changes)), dtype="float32", num_threads=1, attention_kernel=kernel
    )
    prepared = prepare(config, nothing)

    def build(spec):
        return Catalogue.load().build("attention_kernel", kernel, BuildContext(config, spec))

    return prepared, build


def batch(start: int, count: int, ids, logit_rows) -> StepBatch:
    slots = torch.arange(start, start + count)
    return StepBatch(
        input_ids=torch.tensor(ids),
        positions=slots,
        cu_query=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([start + count], dtype=torch.int32),
        block_tables=torch.tensor([[0, 1]], dtype=torch.int32),
        slot_mapping=slots,
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        max_query=count,
        max_seq_len=start + count,
    )


def pools(kernel, count):
    return [torch.zeros(kernel.kv_shape(4)) for _ in range(count)]


@pytest.mark.parametrize("kernel_name", ["cpu", "torch"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2"])
@pytest.mark.parametrize("layers", [(0,), (1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("wanted", [[], [11], [9, 10, 11]])
def test_kept_states_are_those_of_transformers(kernel_name, family, layers, wanted):
    prepared, build = parts(kernel_name, family)
    kernel = build(prepared.spec)
    model = load_model(prepared.description, prepared.config, kernel, nothing)
    kept = model.keep_states(layers)
    reference = Oracle(tiny_checkpoint(family)).model
    found = {}
    inner = [*reference.model.layers, reference.model.norm]
    for index in layers:
        inner[index].register_forward_pre_hook(
            lambda _, args, kwargs, index=index: found.__setitem__(
                index, args[0] if args else kwargs["hidden_states"]
            ),
            with_kwargs=True,
        )
    with torch.inference_mode():
        output = reference(input_ids=torch.tensor([TOKENS]), use_cache=False)
        step = batch(0, len(TOKENS), TOKENS, wanted)
        logits = model.logits(
            step, PagedStep(kernel, kernel.plan(step), pools(kernel, prepared.spec.num_layers))
        )
    expected = torch.stack([found[index][0] for index in layers], dim=1)
    torch.testing.assert_close(kept.values, expected, atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(logits.values, output.logits[0][wanted], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("kernel_name", ["cpu", "torch"])
def test_a_head_drafts_as_it_was_trained_to(kernel_name):
    """Depth d of the training, at the last slot, is the d-th draft of a chain."""
    torch.manual_seed(4)
    shape = HeadShape(HIDDEN, INNER, HEADS, KV_HEADS, SIZE, 10000.0, 1e-6, num_states=2)
    trained = TrainableHead(shape)
    folder = write_head(dict(trained.state_dict()), eagle3_config())
    prepared, build = parts(kernel_name)
    layout, weights = read_head(folder, prepared.description)
    kernel = build(prepared.spec)
    assert (layout.heads, layout.kv_heads) == (HEADS, KV_HEADS)
    from conch.worker.state_head import _spec_of

    kernel = build(_spec_of(layout, prepared.spec))
    head = EagleHead(layout, weights, kernel, 512)
    states = torch.randn(1, len(TOKENS), 2 * HIDDEN)
    kv = pools(kernel, 1)
    with torch.inference_mode():
        unrolling = trained.begin(states[:, :-1])
        embedded = functional.embedding(torch.tensor([TOKENS[1:]]), weights.embedding)
        depths = [unrolling.next(embedded)[0] @ weights.logits.T for _ in range(3)]
        computed = len(TOKENS) - 3  # the last two slots are drafts
        step = batch(0, computed, TOKENS[1 : computed + 1], [computed - 1])
        read = head.read(states[0, :computed].unflatten(-1, (2, HIDDEN)))
        slots = head.run(step, read, PagedStep(kernel, kernel.plan(step), kv), None)
        out = head.outputs(slots, range(computed))
        torch.testing.assert_close(head.logits(out), depths[0][:computed], atol=1e-4, rtol=1e-3)
        for ahead in (1, 2):
            slot = computed + ahead - 1
            step = batch(slot, 1, [TOKENS[slot + 1]], [0])
            slots = head.run(step, out[-1:], PagedStep(kernel, kernel.plan(step), kv), None)
            out = head.outputs(slots, [0])
            torch.testing.assert_close(head.logits(out), depths[ahead][slot : slot + 1], atol=1e-4, rtol=1e-3)
