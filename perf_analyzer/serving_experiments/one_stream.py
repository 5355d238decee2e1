"""What is added to a token where one stream runs alone: by Triton, and by conch's host.

The first is the TPOT of a served stream less that of the bare engine, the second that of a served stream less
that of one whose host does the least a Python model can.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from loadgen import perf_runs
from loadgen.grpc_client import greedy
from loadgen.latency import Trace
from loadgen.perf_binary import find_or_install
from loadgen.prompts import prompt

from serving_experiments.bench import BARE_HOST_MODEL, Bench, as_requests

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 128
ROUNDS = 9
SETTINGS = {"enable_prefix_caching": False}


def tpot_ms(trace: Trace) -> float:
    """Return the mean time of a stream's token."""
    assert trace.tpot_s is not None, "more than one response was asked for"
    return 1000 * trace.tpot_s


def measure(bench: Bench) -> dict[str, Any]:
    """Alternate the three after a warm-up; the machine's drift is in each turn alike."""
    binary = find_or_install()
    tokens = 8 if bench.quick else OUTPUT_TOKENS
    added, added_by_host, served_ms = [], [], []
    with (
        bench.server(**SETTINGS) as server,
        bench.bare_host(**SETTINGS) as bare_host,
        bench.engine(**SETTINGS) as engine,
        bench.steps("one stream", ROUNDS + 1) as done,
    ):
        for number in range(ROUNDS + 1):
            text = prompt(PROMPT_TOKENS, 50_000 + number)
            request = greedy(text, tokens)
            served, at_least = (
                tpot_ms(perf_runs.run(binary, url, [request], 1, model=model)[0])
                for url, model in (
                    (server.grpc_url, bench.model_name),
                    (bare_host.grpc_url, BARE_HOST_MODEL),
                )
            )
            whole, first = (
                engine.ask({"requests": as_requests([text], [count]), "concurrency": 1})["seconds"]
                for count in (tokens, 1)
            )
            done()
            if number:
                served_ms.append(served)
                added.append(served - 1000 * (whole - first) / (tokens - 1))
                added_by_host.append(served - at_least)
    return {
        "triton_adds_ms_c1": round(median(added), 3),
        "host_adds_ms_c1": round(median(added_by_host), 3),
        "added_ms": [round(value, 3) for value in added],
        "added_by_host_ms": [round(value, 3) for value in added_by_host],
        "served_tpot_ms": [round(value, 3) for value in served_ms],
        "max_tokens": tokens,
    }
