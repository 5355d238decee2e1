"""Requests whose targets are met while the load rises, by scheduler.

A load of 1 is what the machine can just serve. Most requests are short questions that want their first token
soon, some bring a long document and are patient; all want further tokens at a reader's pace. A request
counts when both its first token and the mean of its further ones came in time.

On the simulated engine a step takes ``step_s + token_s * tokens`` seconds, which is about what SmolLM2 in
bf16 takes on two cores; so a thousand requests cost seconds, and every run is the same. A few loads are
played on the real engine, too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.worker import Worker
from serving_experiments.bench import Bench

SCHEDULERS = ("slo", "fcfs")
LOADS = (0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 1.5)
REAL_LOADS = (0.6, 1.0, 1.3)
REQUESTS = 600
REAL_REQUESTS = 60
LAW = {"step_s": 0.008, "token_s": 0.00028}
BATCH = 16
"""Decoding requests that share the fixed cost of a step, for the estimate of what the machine can serve."""
SETTINGS = {"block_size": 16, "max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 8_192}
SIMULATED_BLOCKS = 8_192


@dataclass(frozen=True)
class Kind:
    """One kind of request."""

    share: float
    prompt: tuple[int, int]
    output: tuple[int, int]
    ttft_target_s: float
    tpot_target_s: float


KINDS = (
    Kind(0.85, (50, 400), (40, 120), 1.0, 0.05),
    Kind(0.15, (1_500, 4_000), (40, 120), 8.0, 0.05),
)


def measure(bench: Bench) -> dict[str, Any]:
    """Play the same arrivals with each scheduler at each load."""
    loads, count = ((0.5, 1.2), 40) if bench.quick else (LOADS, REQUESTS)
    real_loads, real_count = ((0.5,), 6) if bench.quick else (REAL_LOADS, REAL_REQUESTS)
    simulated = {**SETTINGS, "num_gpu_blocks_override": SIMULATED_BLOCKS}
    real = bench.settings(**SETTINGS, model=bench.model_path, kv_cache_memory_bytes=1 << 30)
    total = len(SCHEDULERS) * (len(loads) + len(real_loads))
    with bench.steps("targets met while the load rises", total) as done:
        found = {
            name: {
                scheduler: play({**settings, "scheduler": scheduler}, law, some_loads, number, done)
                for scheduler in SCHEDULERS
            }
            for name, settings, law, some_loads, number in (
                ("simulated", simulated, LAW, loads, count),
                ("real", real, None, real_loads, real_count),
            )
        }
    return {
        "slo_attainment": by_load(found["simulated"], "both"),
        "slo_attainment_real": by_load(found["real"], "both"),
        "law": LAW,
        "requests": {"simulated": count, "real": real_count},
        "requests_per_s_at_load_1": round(capacity(), 3),
        "details": found,
    }


def play(
    settings: Mapping[str, Any],
    law: Mapping[str, float] | None,
    loads: Sequence[float],
    count: int,
    done: Any,  # noqa: ANN401 - advances a progress bar
) -> dict[str, dict[str, float]]:
    """Return shares of requests in time for each load, on one engine."""
    found = {}
    with Worker("arrivals_worker.py", {"settings": dict(settings), "law": law}) as worker:
        if law is None:
            worker.ask({"arrivals": arrivals(0.5, 4, seed=0)})  # warms up
        for load in loads:
            sent = arrivals(load, count, seed=1)
            answer = worker.ask({"arrivals": sent})
            found[str(load)] = shares(sent, answer["served"])
            done()
    return found


def capacity() -> float:
    """Return the requests a second that the law allows, prompts and a shared decode step together."""
    seconds = sum(
        kind.share
        * (
            LAW["token_s"] * (_middle(kind.prompt) + _middle(kind.output))
            + LAW["step_s"] * _middle(kind.output) / BATCH
        )
        for kind in KINDS
    )
    return 1 / seconds


def arrivals(load: float, count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` requests that come at random; the same requests at every load, closer to each other."""
    draw = random.Random(f"targets {seed}")
    at_s, sent = 0.0, []
    for _ in range(count):
        at_s += draw.expovariate(1.0) / (load * capacity())
        kind = draw.choices(KINDS, [kind.share for kind in KINDS])[0]
        sent.append(
            {
                "at_s": at_s,
                "prompt": draw.randint(*kind.prompt),
                "output": draw.randint(*kind.output),
                "tenant": "",
                "ttft_target_s": kind.ttft_target_s,
                "tpot_target_s": kind.tpot_target_s,
            }
        )
    return sent


def shares(sent: Sequence[Mapping[str, Any]], served: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the shares of requests whose first token, further tokens, and both came in time."""
    met = [
        (times["ttft_s"] <= wish["ttft_target_s"], times["tpot_s"] <= wish["tpot_target_s"])
        for wish, times in zip(sent, served, strict=True)
    ]
    return {
        "ttft": round(sum(first for first, _ in met) / len(met), 4),
        "tpot": round(sum(later for _, later in met) / len(met), 4),
        "both": round(sum(first and later for first, later in met) / len(met), 4),
    }


def by_load(found: Mapping[str, Mapping[str, Mapping[str, float]]], key: str) -> dict[str, dict[str, float]]:
    """Return one share by load and scheduler."""
    loads = next(iter(found.values()))
    return {load: {scheduler: figures[load][key] for scheduler, figures in found.items()} for load in loads}


def _middle(span: tuple[int, int]) -> float:
    return sum(span) / 2
