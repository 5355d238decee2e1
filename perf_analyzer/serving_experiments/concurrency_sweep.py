"""Latency and throughput against concurrency, driven by Triton's own perf_analyzer."""

from __future__ import annotations

from typing import Any

from loadgen import perf_runs
from loadgen.grpc_client import greedy
from loadgen.latency import summarise
from loadgen.perf_binary import find_or_install
from loadgen.prompts import prompt

from serving_experiments.bench import Bench

CONCURRENCIES = (1, 4, 16)
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 128


def measure(bench: Bench) -> dict[str, Any]:
    """Serve fixed-length requests, `concurrency` at a time.

    The prompts are new, and the prefix cache is off for the case that a level is sent again.
    """
    binary = find_or_install()
    output_tokens = 8 if bench.quick else OUTPUT_TOKENS
    levels = {}
    with (
        bench.server(enable_prefix_caching=False) as server,
        bench.steps("perf_analyzer at 1, 4, 16", len(CONCURRENCIES)) as done,
    ):
        perf_runs.run(binary, server.grpc_url, [greedy(prompt(64, 0), 8)] * 2, 1, model=bench.model_name)
        for concurrency in CONCURRENCIES:
            count = concurrency if bench.quick else max(8, 4 * concurrency)
            requests = [
                greedy(prompt(PROMPT_TOKENS, 1000 * concurrency + index), output_tokens)
                for index in range(count)
            ]
            traces = perf_runs.run(binary, server.grpc_url, requests, concurrency, model=bench.model_name)
            levels[str(concurrency)] = {
                **summarise(traces),
                "prompt_tokens": sorted({trace.num_prompt for trace in traces if trace.num_prompt}),
            }
            done()
    return {
        "perf_analyzer": binary.version(),
        "wanted_prompt_tokens": PROMPT_TOKENS,
        "max_tokens": output_tokens,
        "server_start_s": round(server.start_s, 2),
        "concurrency": levels,
    }
