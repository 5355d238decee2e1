"""Faults that every combination must be free of, each as one compact scenario on a `Stand`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from conch.api import SamplingParams
from conch.api.steps import FinishReason, RequestOutput
from support.combinations import BLOCK, BUDGET, POOL_TOKENS
from support.stand import Answer, Job, Stand, draw, greedy


@dataclass(frozen=True)
class Scenario:
    """Some faults, what is shown in words, and how."""

    faults: str
    shows: str
    run: Callable[[Stand], None]


# -- F21


def burst(stand: Stand) -> None:
    rng = random.Random(21)
    decodes = [Job(draw(rng, 10), greedy(30)) for _ in range(3)]
    at_once = [Job(draw(rng, length), greedy(5)) for length in [20] * 8 + [70] * 3]
    late = Job(draw(rng, 5), greedy(5))
    assert sum(len(job.prompt) for job in at_once) > 10 * BUDGET
    jobs = [*decodes, *at_once, late]
    stand.check(jobs, stand.serve(jobs, [0] * 3 + [3] * len(at_once) + [6]))
    assert stand.most_waiting > 3, "the burst was not in the way"


# -- F25 and F26


def boundaries(stand: Stand) -> None:
    rng = random.Random(26)
    for length in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1):
        job = Job(draw(rng, length), greedy(BLOCK + 2))
        answers = [stand.serve([job])[0] for _ in range(3)] + stand.serve([job] * 4)
        stand.check([job] * 7, answers)
        full = (length - 1) // BLOCK * BLOCK if stand.cell.cache.finds else 0
        assert answers[0].num_cached == 0
        assert all(full <= answer.num_cached < length for answer in answers[1:])


def repeats(stand: Stand) -> None:
    """Forth, back, so that the nearest tiers are asked first, and once more with endings of their own."""
    rng = random.Random(25)
    stems = [draw(rng, rng.randint(20, 60)) for _ in range(14)]
    longer = [(*stem, *draw(rng, 12)) for stem in stems]
    halves = [(*stem[: len(stem) // 2], *draw(rng, 9)) for stem in stems]
    for prompts in (stems, stems[::-1], longer, halves):
        jobs = [Job(prompt, greedy(3)) for prompt in prompts]
        stand.check(jobs, [stand.serve([job])[0] for job in jobs])
    assert (stand.rise("prefix_hits") > 0) is stand.cell.cache.finds
    assert (stand.rise("prefix_host_hits") > 0) is stand.cell.cache.has_tiers
    assert (stand.rise("prefix_disk_hits") > 0) is stand.cell.cache.has_tiers


# -- F29 and F32


def too_large(stand: Stand) -> None:
    rng = random.Random(32)
    stem = draw(rng, POOL_TOKENS - 20)
    fits = [Job(stem, greedy(2)), Job(draw(rng, POOL_TOKENS // 2), greedy(4))] * 2
    stand.check(fits, [stand.serve([job])[0] for job in fits])
    for length in (POOL_TOKENS, POOL_TOKENS + 1, POOL_TOKENS + 30):
        check_refused(stand, Job((*stem, *draw(rng, length - len(stem))), greedy(4)), rng)
    (grown,) = stand.serve([Job(stem, greedy(300))])
    assert grown.finish_reason is FinishReason.LENGTH and grown.num_preemptions == 0
    stand.check([Job(stem, greedy(20))], [grown])
    assert (stand.rise("prefix_hits") > 0) is stand.cell.cache.finds


def check_refused(stand: Stand, big: Job, rng: random.Random) -> None:
    """It is told so at once, with the numbers; whoever comes with it is served, and may fill the pool."""
    others = [Job(draw(rng, 9), greedy(5)) for _ in range(4)]
    refused = stand.add(big)
    (news,) = [output for output in stand.step() if output.request_id == refused]
    assert news.failure is not None and not news.token_ids
    assert f"{len(big.prompt)} tokens" in news.failure.message and f"{POOL_TOKENS}" in news.failure.message
    answers = stand.serve([big, *others])
    assert answers[0].failure == news.failure.message
    stand.check(others, answers[1:])


# -- F30


def chunks(stand: Stand) -> None:
    rng = random.Random(30)
    decodes = [Job(draw(rng, 5), greedy(40)) for _ in range(2)]
    for length in (5 * BUDGET + 1, 5 * BLOCK * 2 - 1):
        long = Job(draw(rng, length), greedy(6))
        ids = [stand.add(job) for job in decodes]
        news: dict[int, list[RequestOutput]] = {}
        while len(news) < len(ids):
            take_step(stand, news)
        ids.append(stand.add(long))
        steps = decoded = 0
        while ids[-1] not in news:
            decoded += take_step(stand, news)
            steps += 1
        least = length // BUDGET
        assert steps >= least and decoded >= least, "nobody decoded beside the long prompt"
        while stand.engine.has_work:
            take_step(stand, news)
        stand.check([*decodes, long], [Answer.of(news[request_id]) for request_id in ids])


def take_step(stand: Stand, news: dict[int, list[RequestOutput]]) -> int:
    """Return how many tokens a step brought."""
    outputs = stand.step()
    for output in outputs:
        news.setdefault(output.request_id, []).append(output)
    return sum(len(output.token_ids) for output in outputs)


# -- F31

MOST_TURNS = 12
VARIANTS = (
    greedy(50),
    greedy(50, logprobs=2),
    greedy(50, repetition_penalty=1.3),
    greedy(50, presence_penalty=1.3, frequency_penalty=0.3),
    SamplingParams(temperature=1.0, seed=5, max_tokens=50, ignore_eos=True),
    SamplingParams(
        temperature=1.0, seed=6, top_p=0.9, repetition_penalty=1.3, max_tokens=50, ignore_eos=True, logprobs=0
    ),
)


def preemption(stand: Stand) -> None:
    """Two requests of each kind, in one order after the other until each kind has been preempted.

    Their prompts are of one length, so that whoever comes last has the least to lose, and new each time, so
    that no drafter knows the answers.
    """
    rng = random.Random(31)
    kinds: set[str] = set()
    for turn in range(MOST_TURNS):
        order = [Job(draw(rng, 20), params) for params in rng.sample(VARIANTS * 2, 2 * len(VARIANTS))]
        answers = stand.serve(order, [index * (turn % 3) for index in range(len(order))])
        stand.check(order, answers)
        preempted = [job for job, answer in zip(order, answers, strict=True) if answer.num_preemptions]
        kinds |= {repr(job.params) for job in preempted}
        if len(kinds) == len(VARIANTS):
            break
    assert len(kinds) == len(VARIANTS), f"only these were ever preempted: {kinds}"
    swaps = stand.cell.preemption == "swap"
    assert (stand.rise("blocks_swapped_out") > 0) is (stand.rise("blocks_swapped_in") > 0) is swaps


# -- F44

SETTINGS = (
    greedy(16),
    greedy(16, repetition_penalty=1.3),
    greedy(16, presence_penalty=2.0),
    greedy(16, frequency_penalty=2.0, logprobs=3),
    greedy(16, logit_bias={17: 4.0, 18: -4.0}),
    greedy(16, logit_bias=dict.fromkeys(range(100, 320), -100.0)),
    greedy(16, min_tokens=12, stop_token_ids=tuple(range(3, 160))),
    greedy(16, stop_token_ids=tuple(range(3, 60))),
    SamplingParams(top_k=5, seed=1, max_tokens=16, ignore_eos=True),
    SamplingParams(top_p=0.3, seed=2, max_tokens=16, ignore_eos=True),
    SamplingParams(min_p=0.2, seed=3, max_tokens=16, ignore_eos=True),
    SamplingParams(
        temperature=0.7, seed=4, repetition_penalty=0.8, logprobs=2, max_tokens=16, ignore_eos=True
    ),
)


def mixture(stand: Stand) -> None:
    rng = random.Random(44)
    prompt = draw(rng, 9)
    jobs = [Job(prompt, params) for params in SETTINGS]
    differing = {stand.truth.alone(job).token_ids for job in jobs}
    assert len(differing) >= len(jobs) - 2, "settings that change nothing prove nothing"
    for _ in range(3):
        order = rng.sample(jobs, len(jobs))
        stand.check(order, stand.serve(order, [rng.randrange(8) for _ in order]))


SCENARIOS = {
    "burst": Scenario("F21", "bursts larger than a step", burst),
    "boundaries": Scenario("F26", "prompts that end at a block, before and behind one", boundaries),
    "repeats": Scenario("F25", "repeated and continued prompts", repeats),
    "too large": Scenario("F29, F32", "requests larger than the KV pool", too_large),
    "chunks": Scenario("F30", "long prompts in chunks beside decodes", chunks),
    "preemption": Scenario(
        "F31", "preempted greedy, seeded and penalised requests, and their log-probabilities", preemption
    ),
    "mixture": Scenario("F44", "mixed sampling settings in any order", mixture),
}
