"""Scheduling and KV over tiny checkpoints: F21, F25, F26, F29, F30, F31 and F32."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from conch.api import EngineConfig, RequestError, SamplingParams
from conch.api.steps import FinishReason, RequestOutput
from conch.engine.local import LocalEngine
from support.oracle import Oracle, Same
from support.tiny import tiny_checkpoint

BLOCK = 16
CONTEXT = 2048
SMALL_POOL = 12


def checkpoint() -> Path:
    return tiny_checkpoint("llama", max_position_embeddings=CONTEXT)


@cache
def oracle() -> Oracle:
    return Oracle(checkpoint())


@contextmanager
def engine_with(**settings) -> Iterator[LocalEngine]:
    """Build an engine; checks that nothing is left in it afterwards."""
    defaults = {
        "dtype": "float32",
        "num_threads": 1,
        "num_gpu_blocks_override": 400,
        "max_num_seqs": 24,
        "seed": 1,
    }
    with LocalEngine(EngineConfig(model=str(checkpoint()), **{**defaults, **settings})) as engine:
        yield engine
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used, stats.kv_tokens_used) == (0, 0, 0, 0)


def greedy(count: int, **sampling) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **sampling)


def draw(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 320) for _ in range(length)]


def run(engine: LocalEngine, jobs: Sequence[tuple[list[int], SamplingParams]], each_step: int = 1000) -> list:
    """Serve jobs, `each_step` of them joining in each step."""
    queue, done = list(enumerate(jobs))[::-1], {}
    index_of = {}
    while queue or engine.has_work:
        for _ in range(min(each_step, len(queue))):
            index, (prompt, params) = queue.pop()
            index_of[engine.add(prompt, params)] = index
        for output in engine.step():
            assert output.failure is None, output.failure
            done.setdefault(index_of[output.request_id], []).append(output)
    return [done[index] for index in range(len(jobs))]


def tokens(outputs: Sequence[RequestOutput], choice: int = 0) -> list[int]:
    return [token for output in outputs if output.choice == choice for token in output.token_ids]


def check_all(jobs, answers) -> None:
    same = Same(oracle())
    for (prompt, params), answer in zip(jobs, answers, strict=True):
        assert len(tokens(answer)) == params.max_tokens
        same.check(prompt, tokens(answer))
    same.finish()


# -- F21: a burst larger than the budget of a step


def test_a_burst_of_prompts_larger_than_the_budget():
    rng, budget = random.Random(21), 64
    decodes = [(draw(rng, 10), greedy(120)) for _ in range(4)]
    burst = [(draw(rng, length), greedy(6)) for length in [60] * 12 + [500] * 3]
    short = (draw(rng, 5), greedy(6))
    with engine_with(max_num_batched_tokens=budget, enable_prefix_caching=False) as engine:
        ids = [engine.add(*job) for job in decodes]
        answers: dict[int, list[RequestOutput]] = {}

        def step() -> None:
            before = engine.stats()
            for output in engine.step():
                assert output.failure is None
                answers.setdefault(output.request_id, []).append(output)
            after = engine.stats()
            assert after.computed_tokens - before.computed_tokens <= budget

        for _ in range(3):
            step()
        ids += [engine.add(*job) for job in burst]
        for _ in range(10):
            step()
        owed = 12 * 60 + 3 * 500 + 4 * 10 + 4 * 3 - engine.stats().computed_tokens
        assert owed > 10 * budget, "the burst was not in the way"
        late, waited = engine.add(*short), 0
        ids.append(late)
        while late not in answers:
            step()
            waited += 1
        assert waited <= math.ceil(owed / (budget - 20)) + 2
        while engine.has_work:
            step()
    check_all([*decodes, *burst, short], [answers[request_id] for request_id in ids])


# -- F25 and F26: cached prefixes


def test_a_cached_prefix_changes_nothing():
    rng = random.Random(25)
    stems = [
        draw(rng, length) for length in (5, 16, 17, 31, 32, 40, 64, 100, 130, 160, 200, 220, 256, 288, 300)
    ]
    jobs = []
    for stem in stems:
        half = [*stem[: len(stem) // 2], *draw(rng, len(stem) - len(stem) // 2)]
        jobs += [stem, stem, stem, stem, [*stem, *draw(rng, 20)], half]
    asks = [(prompt, greedy(8)) for prompt in jobs]
    with engine_with() as warm:
        answers = [run(warm, [ask])[0] for ask in asks]
    with engine_with(enable_prefix_caching=False) as cold:
        plain = [run(cold, [ask])[0] for ask in asks]
        assert cold.stats().prefix_hits == 0
    check_all(asks, answers)
    assert [tokens(answer) for answer in answers] == [tokens(answer) for answer in plain]
    for first in range(0, len(jobs), 6):
        cached = [answer[-1].usage.num_cached for answer in answers[first : first + 6]]
        length = len(jobs[first])
        full = (length - 1) // BLOCK * BLOCK
        assert cached[0] == 0 and cached[1:4] == [full] * 3
        assert cached[4] == length // BLOCK * BLOCK
        assert cached[5] == length // 2 // BLOCK * BLOCK


@pytest.mark.parametrize("block", [4, 16])
def test_prompts_that_end_at_a_block(block):
    rng = random.Random(26)
    lengths = (block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1, 4 * block)
    with engine_with(block_size=block) as engine:
        for length in lengths:
            job = (draw(rng, length), greedy(block + 2))
            alone = [run(engine, [job])[0] for _ in range(3)]
            together = run(engine, [job] * 8)
            check_all([job] * 11, [*alone, *together])
            cached = [answer[-1].usage.num_cached for answer in [*alone, *together]]
            full = (length - 1) // block * block
            assert cached == [0] + [full] * 10 and full <= length - 1


# -- F29 and F32: what the pool cannot hold


def test_sizes_up_to_the_pool_with_and_without_cache():
    pool = SMALL_POOL * BLOCK
    rng = random.Random(29)
    prompts = [draw(rng, round(pool * share)) for share in (0.5, 0.9, 1.0, 1.1)]
    prompts += [draw(rng, pool - 1), draw(rng, pool + 1)]
    twice = [prompt for prompt in prompts for _ in range(2)]
    outcomes = []
    for caching in (True, False):
        with engine_with(num_gpu_blocks_override=SMALL_POOL, enable_prefix_caching=caching) as engine:
            outcome = []
            for prompt in twice:
                try:
                    outcome.append(tokens(list(engine.stream(prompt, greedy(4)))))
                except RequestError as error:
                    assert f"{len(prompt)} tokens" in str(error) and f"{pool}" in str(error)
                    outcome.append(None)
            outcomes.append(outcome)
            assert (engine.stats().prefix_hits > 0) is caching
    assert outcomes[0] == outcomes[1]
    for prompt, outcome in zip(twice, outcomes[0], strict=True):
        if len(prompt) >= pool:
            assert outcome is None
        else:
            assert outcome == oracle().greedy(prompt, min(4, pool - len(prompt)))


@pytest.mark.parametrize("caching", [True, False])
def test_two_hundred_at_once_in_a_small_pool(caching):
    rng = random.Random(200)
    stem = draw(rng, 40)
    jobs = [
        ([*stem[: rng.randrange(40)], *draw(rng, rng.randint(1, 60))], greedy(rng.randint(1, 12)))
        for _ in range(200)
    ]
    settings = {"num_gpu_blocks_override": SMALL_POOL, "max_num_seqs": 64, "enable_prefix_caching": caching}
    with engine_with(**settings) as engine:
        answers = run(engine, jobs)
        assert engine.stats().preemptions > 0 and (engine.stats().prefix_hits > 0) is caching
    check_all(jobs, answers)
    assert all(answer[-1].finish_reason is FinishReason.LENGTH for answer in answers)


def test_a_cached_prefix_makes_no_room_for_what_is_too_large():
    pool = SMALL_POOL * BLOCK
    rng = random.Random(32)
    prompt = draw(rng, pool + 30)
    with engine_with(num_gpu_blocks_override=SMALL_POOL) as engine:
        run(engine, [(prompt[: pool - 20], greedy(2))])
        big = engine.add(prompt, greedy(4))
        small = {engine.add(job, greedy(5)): job for job in (draw(rng, 9) for _ in range(5))}
        grows = engine.add(prompt[: pool - 20], greedy(500))
        news: dict[int, list[RequestOutput]] = {}
        while engine.has_work:
            for output in engine.step():
                news.setdefault(output.request_id, []).append(output)
        assert f"{pool + 30} tokens" in news[big][0].failure.message
        assert engine.stats().prefix_hits > 0
    for request_id, job in small.items():
        assert tokens(news[request_id]) == oracle().greedy(job, 5)
    assert tokens(news[grows]) == oracle().greedy(prompt[: pool - 20], 20)
    assert news[grows][-1].finish_reason is FinishReason.LENGTH
    assert news[grows][-1].usage.num_preemptions <= 1, "it would not stop preempting itself"


# -- F30: chunks of a long prompt

LONG = 1500


@pytest.mark.parametrize("budget", [16, 17, 64, 256, 4096])
@pytest.mark.parametrize("crowded", [False, True])
def test_chunks_of_any_size(budget, crowded):
    rng = random.Random(30)
    on_boundary = LONG // budget * budget or LONG
    long_job = (draw(rng, LONG), greedy(8))
    others = [(draw(rng, 6), greedy(40)) for _ in range(6)] + [
        (draw(rng, 400), greedy(4)),
        (draw(rng, 417), greedy(4)),
    ]
    ends = [
        (draw(rng, min(LONG, on_boundary) // 2 // BLOCK * BLOCK + extra), greedy(4)) for extra in (-1, 0, 1)
    ]
    jobs = [*others, long_job, *ends] if crowded else [long_job]
    settings = {
        "max_num_batched_tokens": budget,
        "max_num_seqs": min(16, budget),
        "enable_prefix_caching": False,
    }
    with engine_with(**settings) as engine:
        runs = [run(engine, jobs, each_step=2) for _ in range(3 if budget > 17 else 1)]
        assert engine.stats().steps >= len(runs) * LONG // budget
    for answers in runs:
        check_all(jobs, answers)
        assert [tokens(a) for a in answers] == [tokens(a) for a in runs[0]]


@pytest.mark.parametrize("budget", [16, 17, 64])
def test_a_last_chunk_of_one_token(budget):
    rng = random.Random(31)
    jobs = [
        (draw(rng, length), greedy(5)) for length in (budget + 1, 2 * budget + 1, 6 * budget + 1, 6 * budget)
    ]
    with engine_with(max_num_batched_tokens=budget, max_num_seqs=16, enable_prefix_caching=False) as engine:
        for job in jobs:
            before = engine.stats().steps
            check_all([job], run(engine, [job]))
            assert engine.stats().steps - before == math.ceil(len(job[0]) / budget) + 4


# -- F31: nothing is lost to preemption

VARIANTS = {
    "greedy": greedy(100),
    "seeded": SamplingParams(temperature=1.0, seed=5, max_tokens=100, ignore_eos=True),
    "repetition": greedy(100, repetition_penalty=1.3),
    "presence": greedy(100, presence_penalty=1.3, frequency_penalty=0.3),
    "penalised and seeded": SamplingParams(
        temperature=1.0, seed=6, top_p=0.9, repetition_penalty=1.3, max_tokens=100, ignore_eos=True
    ),
    "logprobs": greedy(100, logprobs=3),
    "choices": SamplingParams(n=2, temperature=1.0, seed=7, max_tokens=60, ignore_eos=True),
    "stop tokens": greedy(100, stop_token_ids=tuple(range(3, 320, 61))),
    "min tokens": greedy(100, min_tokens=90, stop_token_ids=(7, 8, 9, 10, 11, 12)),
}


MODES = {
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap", "swap_space_bytes": 1 << 20},
}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", VARIANTS)
def test_preemption_loses_nothing(name, mode, caching):
    params, rng = VARIANTS[name], random.Random(name)
    jobs = [(draw(rng, rng.randint(20, 45)), params) for _ in range(6)]
    with engine_with() as roomy:
        solo = [run(roomy, [job])[0] for job in jobs]
        assert roomy.stats().preemptions == 0
    settings = {"num_gpu_blocks_override": SMALL_POOL, "enable_prefix_caching": caching, **MODES[mode]}
    with engine_with(**settings) as engine:
        answers = run(engine, jobs, each_step=2)
        stats = engine.stats()
        assert stats.preemptions > 0, "the pool was never short"
        assert (stats.blocks_swapped_out > 0) is (stats.blocks_swapped_in > 0) is (mode == "swap")
        assert stats.kv_blocks_parked == 0
    assert any(output.usage.num_preemptions for answer in answers for output in answer if output.usage)
    for answer, alone in zip(answers, solo, strict=True):
        for choice in range(params.n):
            assert tokens(answer, choice) == tokens(alone, choice)
        assert logprobs_of(answer) == pytest.approx(logprobs_of(alone), abs=1e-4)
        assert answer[-1].finish_reason is alone[-1].finish_reason
        assert answer[-1].usage.num_output == len(tokens(answer, answer[-1].choice))


def logprobs_of(answer: Sequence[RequestOutput]) -> list[float]:
    return [entry.logprob for output in answer for entry in output.logprobs or ()]
