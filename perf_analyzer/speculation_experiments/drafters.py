"""What each drafter gains, back-off on: decode tokens a second with it over without, one stream and sixteen.

All engines stay up and take turns on the same prompts, each of which is served once. The drafters may learn
on a first lot, which is not counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from serving_experiments.bench import Bench

from speculation_experiments import engines
from speculation_experiments.engines import NONE, Answer
from speculation_experiments.work import WORKLOADS, Lots

ROUNDS = {1: 5, 16: 9}
"""By concurrency: sixteen streams are soon done, and gain or lose less than a round swings."""
OUTPUT_TOKENS = 128
STREAMS = {1: 3, 16: 16}
Answers = dict[str, dict[str, dict[int, list[Answer]]]]


def measure(bench: Bench) -> dict[str, Any]:
    """Take turns, round by round, workload by workload; who goes first changes."""
    configs = engines.drafters(bench.model_path)
    rounds, output = (dict.fromkeys(ROUNDS, 1), 16) if bench.quick else (ROUNDS, OUTPUT_TOKENS)
    lots = Lots()
    answers: Answers = {name: {kind: {c: [] for c in ROUNDS} for kind in WORKLOADS} for name in configs}
    total = sum(count + 1 for count in rounds.values()) * len(WORKLOADS) * len(configs)
    with contextlib.ExitStack() as stack, bench.steps("drafters, back-off on", total) as done:
        workers = {
            name: stack.enter_context(engines.engine(bench, config)) for name, config in configs.items()
        }
        for number in range(max(rounds.values()) + 1):
            for workload in WORKLOADS:
                for at_once in (size for size, most in rounds.items() if number <= most):
                    count = at_once if bench.quick else STREAMS[at_once]
                    question = {**lots.draw(workload, count), "at_once": at_once, "max_tokens": output}
                    found = {}
                    for name in _turned(list(workers), number):
                        found[name] = workers[name].ask(question)
                        engines.check_same_work(found[name], found[name], output)
                        done()
                    for name in found if number else ():  # the first round warms up
                        found[name]["agreement"] = engines.agreement(found[name], found[NONE])
                        answers[name][workload][at_once].append(found[name])
    speedups = _by_case(answers, lambda some, without: engines.speedup(some, without))
    return {
        "speedup": speedups,
        "acceptance_length": _by_case(answers, lambda some, _: engines.acceptance_length(some)),
        "min_speedup_c16_with_backoff": min(
            figures["c16"] for by_kind in speedups.values() for figures in by_kind.values()
        ),
        "configs": engines.recorded(configs),
        "settings": engines.SETTINGS,
        "output_tokens": output,
        "rounds": rounds,
        "details": _details(answers),
    }


def _turned(names: list[str], by: int) -> list[str]:
    at = by % len(names)
    return names[at:] + names[:at]


def _by_case(answers: Answers, figure: Any) -> dict[str, dict[str, dict[str, Any]]]:  # noqa: ANN401
    """Return a figure by drafter, workload and concurrency."""
    return {
        name: {
            kind: {f"c{count}": figure(some, answers[NONE][kind][count]) for count, some in by_count.items()}
            for kind, by_count in by_kind.items()
        }
        for name, by_kind in answers.items()
        if name != NONE
    }


def _details(answers: Answers) -> dict[str, Any]:
    return {
        name: {
            kind: {
                f"c{count}": {
                    "tokens_per_s": [round(engines.speed(answer), 2) for answer in some],
                    "acceptance_by_position": engines.acceptance_by_position(some),
                    "same_as_without": [answer["agreement"] for answer in some],
                    **_sums(some),
                }
                for count, some in by_count.items()
            }
            for kind, by_count in by_kind.items()
        }
        for name, by_kind in answers.items()
    }


def _sums(answers: list[Answer]) -> Mapping[str, float]:
    names = ("steps", "drafts", "drafts_proposed", "drafts_accepted", "drafting_s", "seconds")
    return {name: round(sum(answer[name] for answer in answers), 3) for name in names}
