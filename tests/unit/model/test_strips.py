"""A step of many tokens goes through the layers of a fused decoder in strips, and nobody can tell."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conch.model.attention import PagedStep
from conch.model.choosing import load_model
from conch_kernels.cpu.library import library
from support.model_steps import BLOCK, batch, by_transformers, nothing, parts, pools
from support.tiny import tiny_checkpoint

MEMBERS = 2
COUNT = 450
FEW = 150
LONG = {"num_threads": MEMBERS, "max_model_len": 512}
FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "granite",
    "phi3",
    "smollm3",
)


def strips(rows, members):
    return library().conch_strips(rows, members, None)


def begins(rows, members):
    room = (ctypes.c_int32 * (strips(rows, members) + 1))()
    library().conch_strips(rows, members, room)
    return list(room)


@settings(deadline=None)
@given(rows=st.integers(1, 5000), members=st.integers(1, 16))
def test_strips_are_the_rows_in_even_parts(rows, members):
    starts = begins(rows, members)
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    assert starts[0] == 0 and starts[-1] == rows and min(lengths) > 0
    assert len(lengths) == 1 or len(lengths) % members == 0
    assert max(lengths) - min(lengths) <= 24


@pytest.mark.parametrize("family", FAMILIES)
def test_long_steps_are_those_of_transformers(family):
    assert strips(COUNT, MEMBERS) > 1
    prepared, build = parts("cpu", family, LONG)
    kernel = build(prepared.spec)
    model = load_model(prepared.description, prepared.config, kernel, nothing)
    layers = range(prepared.spec.num_layers + 1)
    kept = model.keep_states(layers)
    tokens = torch.randint(3, 320, (COUNT,), generator=torch.Generator().manual_seed(1))
    step = batch(0, COUNT, tokens, range(COUNT))
    kv = pools(kernel, prepared.spec.num_layers, COUNT // BLOCK + 1)
    all_logits, states = by_transformers(tiny_checkpoint(family), tokens, layers)
    with torch.inference_mode():
        logits = model.logits(step, PagedStep(kernel, kernel.plan(step), kv))
    torch.testing.assert_close(logits.values, all_logits, atol=5e-3, rtol=1e-3)
    assert torch.equal(logits.values.argmax(dim=1), all_logits.argmax(dim=1))
    torch.testing.assert_close(kept.values, states, atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_long_steps_are_many_short_ones_to_the_bit(family, dtype, quantization):
    assert strips(COUNT, MEMBERS) > 1 == strips(FEW, MEMBERS)
    chosen = {"dtype": dtype, "quantization": quantization, **LONG}
    prepared, build = parts("cpu", family, chosen, hidden_size=64)
    kernel = build(prepared.spec)
    model = load_model(prepared.description, prepared.config, kernel, nothing)
    tokens = torch.randint(3, 320, (COUNT,), generator=torch.Generator().manual_seed(2))

    def run(size):
        kv = pools(kernel, prepared.spec.num_layers, COUNT // BLOCK + 1, getattr(torch, dtype))
        found = []
        for start in range(0, COUNT, size):
            step = batch(start, size, tokens[start : start + size], range(size))
            found.append(model.logits(step, PagedStep(kernel, kernel.plan(step), kv)).values.clone())
        return torch.cat(found)

    with torch.inference_mode():
        assert torch.equal(run(COUNT), run(FEW))
