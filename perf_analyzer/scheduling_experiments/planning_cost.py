"""What the host's whole work on a step costs, without a model, against vLLM's own scheduler.

Ours: arrival, plan, apply and commit, with scheduler, KV manager, prefix cache and request table. vLLM's:
the making of a `Request`, `add_request`, `schedule` and `update_from_output`, in the venv that `bench-peers`
makes. Both get the same prompts, lengths and arrivals (see `in_process/planning_trace.py`), a pool of a
million blocks of 16 tokens and a prefix cache that holds a hundred thousand of them; that both find the same
number of tokens cached is checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from statistics import median
from typing import Any

from peers import venvs
from peers.engines import ENGINES, OURS, PEERS
from peers.process import Program, ProgramError
from serving_experiments.bench import Bench

ROWS = (64, 256, 1_024, 4_096)
BLOCKS = 1 << 20
HITS_APART = 0.03
CACHED_BLOCKS = 100_000
ROUNDS = 3
DECODE_STEPS = 300
CHURN_STEPS = 60
LIMITS = {
    "max_num_seqs": max(ROWS),
    "max_num_batched_tokens": 16_384,
    "max_model_len": 8_192,
    "block_size": 16,
}
VLLM = "vllm"
TIMEOUT_S = 900.0
Answers = dict[str, dict[int, list[dict[str, Any]]]]


def measure(bench: Bench) -> dict[str, Any]:
    """Alternate the two, row count by row count."""
    rows, rounds = ((16, 64), 1) if bench.quick else (ROWS, ROUNDS)
    cached = 1_000 if bench.quick else CACHED_BLOCKS
    question = {
        "cached_blocks": cached,
        "decode_steps": 40 if bench.quick else DECODE_STEPS,
        "churn_steps": 10 if bench.quick else CHURN_STEPS,
    }
    with contextlib.ExitStack() as stack, bench.steps("planning cost", 2 * rounds * len(rows)) as done:
        programs = {OURS: stack.enter_context(ours())}
        failure = None
        try:
            programs[VLLM] = stack.enter_context(vllm())
        except (ProgramError, OSError) as error:  # ours stands without it
            failure = f"{type(error).__name__}: {error}"
        for program in programs.values():
            program.ask({"fill": cached}, TIMEOUT_S)
        answers: Answers = {name: {count: [] for count in rows} for name in programs}
        for _ in range(rounds):
            for count in rows:
                for name, program in programs.items():
                    answers[name][count].append(program.ask({"rows": count, **question}, TIMEOUT_S))
                    done()
    check_same_work(answers)
    return {
        "plan_us_per_row": by_rows(answers[OURS], "decode_us_per_row"),
        "plan_over_vllm": None if failure else ratios(answers, "decode_us_per_row"),
        "churn_us_per_row": by_rows(answers[OURS], "churn_us_per_row"),
        "churn_over_vllm": None if failure else ratios(answers, "churn_us_per_row"),
        "vllm_us_per_row": None if failure else by_rows(answers[VLLM], "decode_us_per_row"),
        "vllm_versions": None if failure else venvs.versions_of(VLLM),
        "vllm_failure": failure,
        "blocks": BLOCKS,
        **question,
        "limits": LIMITS,
        "rounds": answers,
    }


def ours() -> Program:
    """Return our host side as a program, started by entering it."""
    settings = {**LIMITS, "num_gpu_blocks_override": BLOCKS, "max_queue_size": 2 * max(ROWS)}
    return Program(venvs.python_of(OURS), "conch_scheduler.py", {"settings": settings})


def vllm() -> Program:
    """Return vLLM's scheduler as a program, started by entering it; it is installed where it is missing."""
    venvs.install(next(peer for peer in PEERS if peer.name == VLLM))
    engine = next(engine for engine in ENGINES if engine.name == VLLM)
    options = {**LIMITS, "num_blocks": BLOCKS}
    return Program(
        venvs.python_of(VLLM), "vllm_scheduler.py", options, engine.variables, engine.start_timeout_s
    )


def check_same_work(answers: Answers) -> None:
    """Raise RuntimeError where the programs did not serve the same trace, or where memory was short.

    Who is admitted before whom is the schedulers' own business, and whoever comes later finds more cached:
    hits may differ by `HITS_APART`.
    """
    names = list(answers)
    for count in answers[OURS]:
        served = [[answer["counts"] for answer in answers[name][count]] for name in names]
        hits = [sum(one["hit_tokens"] for one in each) for each in served]
        if max(hits) > (1 + HITS_APART) * min(hits):
            raise RuntimeError(f"{count} rows: the programs served different work: {served}")
        if any(one["preemptions"] for one in served[0]):
            raise RuntimeError(f"{count} rows: requests were preempted: {served[0]}")


def by_rows(rounds: Mapping[int, list[dict[str, Any]]], key: str) -> dict[str, float]:
    """Return the median over rounds of each round's median microseconds a row."""
    return {
        str(count): round(median(answer[key]["median"] for answer in answers), 3)
        for count, answers in rounds.items()
    }


def ratios(answers: Answers, key: str) -> dict[str, float]:
    """Return ours over vLLM's by rows: the median over rounds of the ratio within a round."""
    return {
        str(count): round(
            median(
                mine[key]["median"] / theirs[key]["median"]
                for mine, theirs in zip(answers[OURS][count], answers[VLLM][count], strict=True)
            ),
            4,
        )
        for count in answers[OURS]
    }
