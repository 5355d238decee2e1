"""Greedy output equals transformers in fp32 under every scheduler, in a pool that is too small."""

from __future__ import annotations

import random

import pytest

from conch.api import EngineConfig, SamplingParams
from conch.engine.catalogue import Catalogue
from conch.engine.local import LocalEngine
from support.oracle import Oracle, Same
from support.tiny import tiny_checkpoint
from support.traffic import mixed_prompts

SCHEDULERS = Catalogue.load().names("scheduler")
COUNT = 24


@pytest.fixture(scope="module")
def oracle():
    return Oracle(tiny_checkpoint("llama"))


def serve(engine, prompts, budgets):
    """Serve all prompts, a few more with each step, as three tenants of three priorities."""
    answers, left = {}, list(enumerate(zip(prompts, budgets, strict=True)))
    while left or engine.has_work:
        for number, (prompt, budget) in left[:2]:
            params = SamplingParams(temperature=0.0, max_tokens=budget, ignore_eos=True)
            kind = number // 2 % 3  # pairs share a prefix
            request_id = engine.add(prompt, params, priority=kind, tenant=f"tenant {kind}")
            answers[request_id] = []
        left = left[2:]
        for output in engine.step():
            assert output.failure is None, output.failure
            answers[output.request_id] += output.token_ids
    return list(answers.values())


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("chunk", [16, 512])
def test_output_is_that_of_transformers(name, chunk, oracle):
    config = EngineConfig(
        model=str(tiny_checkpoint("llama")),
        dtype="float32",
        num_threads=1,
        max_num_seqs=12,
        max_num_batched_tokens=chunk,
        num_gpu_blocks_override=12,
        scheduler=name,
        ttft_target_s=1.0,
        tpot_target_s=0.01,
    )
    rng = random.Random(name)
    prompts = mixed_prompts(rng, COUNT, longest=100, vocab=200)
    budgets = [rng.randint(10, 60) for _ in prompts]
    with LocalEngine(config) as engine:
        answers = serve(engine, prompts, budgets)
        stats = engine.stats()
    same = Same(oracle)
    for prompt, budget, answer in zip(prompts, budgets, answers, strict=True):
        assert len(answer) == budget
        same.check(list(prompt), list(answer))
    same.finish()
    assert stats.preemptions > 0, "the pool was never short"
    assert stats.prefix_hits > 0
    assert stats.kv_blocks_used == 0
