"""Where drafting pays: gains by batch size and by drafts in a row, without back-off.

One engine for each drafter: how much is drafted, nothing among it, is each request's own setting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loadgen.worker import Worker
from serving_experiments.bench import Bench

from speculation_experiments import engines
from speculation_experiments.engines import Answer
from speculation_experiments.work import Lots

BATCHES = (1, 4, 16)
DRAFTS = (0, 1, 2, 3, 4, 5)
DRAFTED_FOR = {"ngram": "copying", "draft_model": "chat", "eagle": "chat"}
STREAMS = {1: 2, 4: 4, 16: 16}
ROUNDS = 2
OUTPUT_TOKENS = 96


def measure(bench: Bench) -> dict[str, Any]:
    """Go through the drafters that have a model here."""
    configs = engines.drafters(bench.model_path)
    chosen = {name: config for name in DRAFTED_FOR if (config := configs.get(name))}
    rounds = 1 if bench.quick else ROUNDS
    steps = len(chosen) * rounds * len(BATCHES) * len(DRAFTS)
    found: dict[str, dict[str, Any]] = {}
    with bench.steps("batch sizes and drafts in a row", steps) as done:
        for name, config in chosen.items():
            own = {**config, "num_speculative_tokens": max(DRAFTS), "backoff": False}
            with engines.engine(bench, own) as worker:
                answers = _ask_all(worker, DRAFTED_FOR[name], bench.quick, rounds, done)
            found[name] = _figures(answers)
    return {"speedup_by_batch_and_k": found, "drafted_for": DRAFTED_FOR}


def _ask_all(
    worker: Worker, workload: str, quick: bool, rounds: int, done: Callable[[], None]
) -> dict[int, dict[int, list[Answer]]]:
    lots, output = Lots(), 8 if quick else OUTPUT_TOKENS
    answers: dict[int, dict[int, list[Answer]]] = {size: {k: [] for k in DRAFTS} for size in BATCHES}
    worker.ask({**lots.draw(workload, 4), "at_once": 4, "max_tokens": 8})
    for number in range(rounds):
        for size in BATCHES:
            work = lots.draw(workload, size if quick else STREAMS[size])
            for k in DRAFTS if number % 2 else reversed(DRAFTS):
                question = {**work, "at_once": size, "max_tokens": output, "drafts": k}
                answers[size][k].append(worker.ask(question))
                done()
    return answers


def _figures(answers: dict[int, dict[int, list[Answer]]]) -> dict[str, Any]:
    most = [some for by_k in answers.values() for some in by_k[max(DRAFTS)]]
    return {
        "acceptance_by_position": engines.acceptance_by_position(most),
        "acceptance_length": {
            str(k): engines.acceptance_length([one for by_k in answers.values() for one in by_k[k]])
            for k in DRAFTS[1:]
        },
        "speedup": {
            f"c{size}": {str(k): engines.speedup(by_k[k], by_k[0]) for k in DRAFTS[1:]}
            for size, by_k in answers.items()
        },
        "tokens_per_s": {
            f"c{size}": {str(k): [round(engines.speed(one), 1) for one in some] for k, some in by_k.items()}
            for size, by_k in answers.items()
        },
    }
