"""What Triton costs: tokens a second through the server over those of the same engine driven in process.

All programs stay up for the whole run and take turns, so that a machine that gets slower does so for all.
The load on Triton's side is perf_analyzer, a C++ program, on the same machine: its cost is in the figure. A
second server sends its streams in pieces of `INTERVAL` tokens: most of what Triton costs it costs for each
response. A third has conch's engine behind a host that does the least a Python model can: what conch's own
host costs is the difference from that one.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from loadgen import perf_runs
from loadgen.grpc_client import greedy
from loadgen.latency import duration_s
from loadgen.perf_binary import find_or_install
from loadgen.prompts import prompt

from serving_experiments.bench import BARE_HOST_MODEL, Bench, as_requests, ratio_of_medians

CONCURRENCY = 16
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 128
INTERVAL = 4
ROUNDS = 5
# All prompts are new; were a round sent again, see `perf_runs.run`, it must find nothing of them in a cache.
SETTINGS = {"enable_prefix_caching": False}


def measure(bench: Bench) -> dict[str, Any]:
    """Alternate the four, `ROUNDS` times after a warm-up; each round has new prompts, the same for all."""
    binary = find_or_install()
    count = CONCURRENCY if bench.quick else 4 * CONCURRENCY
    tokens = 8 if bench.quick else OUTPUT_TOKENS
    rates: dict[str, list[float]] = {"triton": [], "triton_in_pieces": [], "bare_host": [], "bare": []}
    with (
        bench.server(**SETTINGS) as server,
        bench.server(**SETTINGS, stream_interval=INTERVAL) as in_pieces,
        bench.bare_host(**SETTINGS) as bare_host,
        bench.engine(**SETTINGS) as engine,
        bench.steps("Triton against the bare engine", 4 * (ROUNDS + 1)) as done,
    ):
        for number in range(ROUNDS + 1):
            prompts = [prompt(PROMPT_TOKENS, 10_000 * (number + 1) + index) for index in range(count)]
            requests = [greedy(text, tokens) for text in prompts]
            found = {}
            for name, url, model in (
                ("triton", server.grpc_url, bench.model_name),
                ("triton_in_pieces", in_pieces.grpc_url, bench.model_name),
                ("bare_host", bare_host.grpc_url, BARE_HOST_MODEL),
            ):
                traces = perf_runs.run(binary, url, requests, CONCURRENCY, model=model)
                served = sum(trace.num_tokens for trace in traces)
                if served != tokens * count:
                    raise RuntimeError(f"unequal work: {name} {served}, asked {tokens * count}")
                found[name] = served / duration_s(traces)
                done()
            bare = engine.ask(
                {"requests": as_requests(prompts, [tokens] * count), "concurrency": CONCURRENCY}
            )
            if bare["tokens"] != tokens * count:
                raise RuntimeError(f"unequal work: bare {bare['tokens']}, asked {tokens * count}")
            found["bare"] = bare["tokens"] / bare["seconds"]
            done()
            if number:
                for name, rate in found.items():
                    rates[name].append(rate)
    return {
        "triton_over_bare_c16": ratio_of_medians(rates["triton"], rates["bare"]),
        "triton_in_pieces_over_bare_c16": ratio_of_medians(rates["triton_in_pieces"], rates["bare"]),
        "host_over_bare_host_c16": ratio_of_medians(rates["triton"], rates["bare_host"]),
        "stream_interval": INTERVAL,
        "concurrency": CONCURRENCY,
        "requests_per_round": count,
        "max_tokens": tokens,
        "prompt_tokens": sorted(set(bare["prompt_tokens"])),
        "torch_threads": engine.ready["torch_threads"],
        "tokens_per_s": {name: [round(rate, 2) for rate in values] for name, values in rates.items()},
        "median_tokens_per_s": {name: round(median(values), 2) for name, values in rates.items()},
    }
