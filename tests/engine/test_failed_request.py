"""A request whose numbers are none fails alone: what it leaves in the KV pool reaches nobody."""

from __future__ import annotations

import shutil

import pytest
from safetensors.torch import load_file, save_file

from conch.api import EngineConfig, FinishReason, SamplingParams
from conch.engine.local import LocalEngine

POISON = 7
HEALTHY = [5] * 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def poisonous(tiny_llama, tmp_path):
    """A checkpoint with a token that makes every number after it infinite."""
    folder = tmp_path / "poisonous"
    shutil.copytree(tiny_llama, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("inf")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return EngineConfig(
        model=str(folder), device="cpu", dtype="float32", num_threads=1, num_gpu_blocks_override=8
    )


def serve(engine, *prompts):
    """Run to the end; returns the tokens of each prompt, None for one that failed."""
    ids = [engine.add(prompt, GREEDY) for prompt in prompts]
    tokens = {request_id: [] for request_id in ids}
    while engine.has_work:
        for output in engine.step():
            if output.failure is not None:
                assert "not finite" in output.failure.message
                tokens[output.request_id] = None
            else:
                tokens[output.request_id] += output.token_ids
                assert output.finish_reason in (None, FinishReason.LENGTH)
    return list(tokens.values())


def test_a_request_whose_numbers_are_none_harms_nobody_beside_or_after_it(poisonous):
    with LocalEngine(poisonous) as engine:
        wanted = serve(engine, HEALTHY)
        for length in (1, 15, 40):
            poisoned = [POISON] + [9] * (length - 1)
            assert serve(engine, poisoned, HEALTHY, poisoned) == [None, *wanted, None]
            assert serve(engine, HEALTHY, HEALTHY) == wanted * 2
        assert engine.stats().kv_blocks_used == 0
