"""What Triton adds to a token where one stream runs alone: its TPOT less that of the bare engine."""

from __future__ import annotations

from statistics import median
from typing import Any

from loadgen import perf_runs
from loadgen.grpc_client import greedy
from loadgen.perf_binary import find_or_install
from loadgen.prompts import prompt

from serving_experiments.bench import Bench, as_requests

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 128
ROUNDS = 9
SETTINGS = {"enable_prefix_caching": False}


def measure(bench: Bench) -> dict[str, Any]:
    """Alternate the two after a warm-up; the machine's drift is in each pair alike."""
    binary = find_or_install()
    tokens = 8 if bench.quick else OUTPUT_TOKENS
    added, served_ms = [], []
    with (
        bench.server(**SETTINGS) as server,
        bench.engine(**SETTINGS) as engine,
        bench.steps("one stream", ROUNDS + 1) as done,
    ):
        for number in range(ROUNDS + 1):
            text = prompt(PROMPT_TOKENS, 50_000 + number)
            request = greedy(text, tokens)
            (trace,) = perf_runs.run(binary, server.grpc_url, [request], 1, model=bench.model_name)
            arrivals = [arrival.at_s for arrival in trace.arrivals]
            served = 1000 * (arrivals[-1] - arrivals[0]) / (trace.num_tokens - 1)
            whole, first = (
                engine.ask({"requests": as_requests([text], [count]), "concurrency": 1})["seconds"]
                for count in (tokens, 1)
            )
            done()
            if number:
                served_ms.append(served)
                added.append(served - 1000 * (whole - first) / (tokens - 1))
    return {
        "triton_adds_ms_c1": round(median(added), 3),
        "added_ms": [round(value, 3) for value in added],
        "served_tpot_ms": [round(value, 3) for value in served_ms],
        "max_tokens": tokens,
    }
