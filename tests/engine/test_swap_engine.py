"""Swap and sliding windows over tiny checkpoints: the answers stay those of transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from conch.api import ConfigError, EngineConfig, SamplingParams
from conch.engine.local import LocalEngine
from support.oracle import Oracle, Same
from support.tiny import tiny_checkpoint
from support.traffic import mixed_prompts, staggered

BLOCK, POOL = 16, 12
ROOMY = 4 << 20


@cache
def oracle_of(folder: str) -> Oracle:
    return Oracle(Path(folder))


@contextmanager
def engine_with(family="llama", **settings) -> Iterator[LocalEngine]:
    """Build an engine of a small pool; checks that nothing is left in it afterwards."""
    defaults = {
        "dtype": "float32",
        "num_threads": 1,
        "max_num_seqs": 12,
        "num_gpu_blocks_override": POOL,
        "seed": 1,
    }
    config = EngineConfig(model=str(tiny_checkpoint(family)), **{**defaults, **settings})
    with LocalEngine(config) as engine:
        yield engine
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used, stats.kv_blocks_parked) == (0, 0, 0, 0)


def serve_and_check(engine, rng, count=24) -> None:
    prompts = mixed_prompts(rng, count, longest=100, vocab=200)
    budgets = [rng.randint(10, 60) for _ in prompts]
    same = Same(oracle_of(engine.info.model_folder))
    answers = staggered(engine, prompts, budgets, at_once=32)
    for prompt, budget, answer in zip(prompts, budgets, answers, strict=True):
        assert len(answer) == budget
        same.check(list(prompt), list(answer))
    same.finish()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunk", [16, 512])
def test_swapping_changes_no_answer(family, caching, chunk):
    settings = {"preemption_mode": "swap", "swap_space_bytes": ROOMY}
    with engine_with(
        family, enable_prefix_caching=caching, max_num_batched_tokens=chunk, **settings
    ) as engine:
        serve_and_check(engine, random.Random(family))
        stats = engine.stats()
        assert stats.blocks_swapped_out > 0 and stats.blocks_swapped_in > 0


def test_a_host_pool_that_is_short_falls_back():
    """Three blocks hold the KV of short requests only: the others compute it again."""
    with LocalEngine(
        EngineConfig(model=str(tiny_checkpoint("llama")), dtype="float32", num_threads=1)
    ) as one:
        size = one.info.block_size
    block = 2 * size * 2 * 12 * 4 * 2  # keys and values, two KV heads of 12, fp32, two layers
    with engine_with(
        preemption_mode="swap",
        swap_space_bytes=3 * block,
        enable_prefix_caching=False,
        attention_kernel="torch",
    ) as engine:
        assert engine.stats().swap_blocks_total == 3
        serve_and_check(engine, random.Random(3))
        stats = engine.stats()
        assert 0 < stats.blocks_swapped_in < 3 * stats.preemptions


def test_swap_computes_nothing_twice():
    jobs = [([5 + number] * 20, 60) for number in range(6)]
    with engine_with(preemption_mode="swap", swap_space_bytes=ROOMY, enable_prefix_caching=False) as engine:
        staggered(engine, [prompt for prompt, _ in jobs], [budget for _, budget in jobs], at_once=32)
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.computed_tokens == sum(len(prompt) + budget - 1 for prompt, budget in jobs)


def test_a_client_that_leaves_while_its_kv_is_parked():
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    with engine_with(preemption_mode="swap", swap_space_bytes=ROOMY) as engine:
        ids = [engine.add([5 + number] * 20, params) for number in range(6)]
        while not engine.stats().kv_blocks_parked:
            engine.step()
        for request_id in ids:
            engine.cancel(request_id)
        while engine.has_work:
            engine.step()


def test_too_little_memory_to_swap_to_is_refused():
    with (
        pytest.raises(ConfigError, match=r"swap_space_bytes .* holds no KV block"),
        engine_with(swap_space_bytes=100),
    ):
        pass


@pytest.mark.parametrize("caching", [True, False])
def test_a_window_lets_in_what_is_longer_than_the_pool(caching):
    rng = random.Random(8)
    settings = {"num_gpu_blocks_override": 8, "max_num_batched_tokens": 32, "enable_prefix_caching": caching}
    with engine_with("mistral", **settings) as engine:
        prompts = [[rng.randrange(3, 320) for _ in range(length)] for length in (200, 150, 40)]
        answers = staggered(engine, prompts, [40, 60, 20], at_once=3)
        same = Same(oracle_of(engine.info.model_folder))
    assert len(prompts[0]) > 8 * BLOCK
    for prompt, answer in zip(prompts, answers, strict=True):
        same.check(prompt, list(answer))
    same.finish()


@pytest.mark.parametrize("kernel", ["torch", "cpu"])
@pytest.mark.parametrize("caching", [True, False])
def test_blocks_behind_the_window_serve_others(kernel, caching):
    """Requests that run at once have more tokens than the pool: each keeps its window only."""
    rng, largest = random.Random(24), 0
    prompts = [[rng.randrange(3, 320) for _ in range(20)] for _ in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    answers: dict[int, list[int]] = {}
    with engine_with(
        "mistral", attention_kernel=kernel, enable_prefix_caching=caching, num_gpu_blocks_override=16
    ) as engine:
        ids = [engine.add(prompt, params) for prompt in prompts]
        while engine.has_work:
            for output in engine.step():
                answers.setdefault(output.request_id, []).extend(output.token_ids)
            if engine.stats().running == len(prompts):
                largest = sum(len(answers.get(i, ())) + 20 for i in ids)
        assert engine.stats().preemptions == 0
        same = Same(oracle_of(engine.info.model_folder))
    assert largest > 16 * BLOCK
    for prompt, request_id in zip(prompts, ids, strict=True):
        same.check(prompt, answers[request_id])
    same.finish()
