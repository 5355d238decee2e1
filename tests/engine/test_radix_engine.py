"""The radix cache over a tiny checkpoint: hits inside blocks change no answer (F25, F26)."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from conch.api import EngineConfig, SamplingParams
from conch.engine.local import LocalEngine
from support.oracle import Oracle, Same
from support.tiny import tiny_checkpoint

BLOCK = 16
LEAST = BLOCK // 4


def checkpoint() -> Path:
    return tiny_checkpoint("llama")


@cache
def oracle() -> Oracle:
    return Oracle(checkpoint())


def engine(**settings) -> LocalEngine:
    defaults = {"dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 400, "max_num_seqs": 24}
    return LocalEngine(
        EngineConfig(
            model=str(checkpoint()), prefix_cache="radix", **{**defaults, "block_size": BLOCK, **settings}
        )
    )


def draw(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 320) for _ in range(length)]


def greedy(count: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **more)


def hit(agreed: int, length: int) -> int:
    """Return the tokens found where a prompt agrees with a cached one, itself all full blocks, in so many."""
    agreed = min(agreed, length - 1)
    return agreed if agreed % BLOCK >= LEAST else agreed // BLOCK * BLOCK


def test_a_hit_inside_a_block_changes_nothing():
    rng = random.Random(25)
    same = Same(oracle())
    with engine() as radix:
        for length in (32, 48, 64, 128, 160, 240, 256, 304):
            stem = draw(rng, length)
            cuts = [
                length,
                *sorted(rng.sample(range(1, length), 6)),
                length // 2,
                length // BLOCK * BLOCK - 1,
            ]
            (first,) = radix.generate([stem], [greedy(6)])[0]
            assert first.usage.num_cached < LEAST, "stems begin alike"
            for cut in cuts:
                for prompt in (stem[:cut], [*stem[:cut], 2, *draw(rng, 5)]):
                    (answer,) = radix.generate([prompt], [greedy(6)])[0]
                    same.check(prompt, list(answer.token_ids))
                    assert answer.usage.num_cached >= hit(min(cut, length // BLOCK * BLOCK), len(prompt))
                    assert answer.usage.num_cached < len(prompt)
        assert radix.stats().prefix_hits % BLOCK, "every hit ended at a block"
        assert radix.stats().kv_blocks_used == 0
    same.finish()


@pytest.mark.parametrize("block", [4, 16])
def test_prompts_that_end_at_a_block(block):
    rng = random.Random(26)
    same = Same(oracle())
    with engine(block_size=block) as radix:
        for length in (block, block + 1, 2 * block, 2 * block + 1, 4 * block):
            prompt = draw(rng, length)
            full = length // block * block
            for turn in range(3):
                (answer,) = radix.generate([prompt], [greedy(block + 2)])[0]
                same.check(prompt, list(answer.token_ids))
                assert turn == 0 or answer.usage.num_cached == min(full, length - 1)
            for (answer,) in radix.generate([prompt] * 8, [greedy(block + 2)] * 8):
                same.check(prompt, list(answer.token_ids))
                assert answer.usage.num_cached == min(full, length - 1)
    same.finish()


@pytest.mark.parametrize("swap", [0, 1 << 20])
def test_many_at_once_in_a_small_pool(swap):
    rng = random.Random(31)
    stem = draw(rng, 40)
    prompts = [[*stem[: rng.randrange(41)], *draw(rng, rng.randint(1, 40))] for _ in range(60)]
    params = [greedy(rng.randint(1, 25), n=1) for _ in prompts]
    same = Same(oracle())
    with engine(num_gpu_blocks_override=12, swap_space_bytes=swap) as radix:
        answers = radix.generate(prompts, params)
        stats = radix.stats()
        assert stats.preemptions > 0 and stats.prefix_hits > 0 and stats.kv_blocks_used == 0
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        same.check(prompt, list(answer.token_ids))
    same.finish()


def test_choices_fork_behind_a_hit_inside_a_block():
    rng = random.Random(7)
    stem = draw(rng, 64)
    with engine() as radix:
        radix.generate([stem], [greedy(2)])
        prompt = [*stem[:55], *draw(rng, 3)]
        answers = radix.generate([prompt], [greedy(20, n=3)])[0]
        assert [answer.usage.num_cached for answer in answers] == [55] * 3
        for answer in answers:
            assert list(answer.token_ids) == oracle().greedy(prompt, 20)
