"""What Triton costs: tokens a second through the server over those of the same engine driven in process.

Both programs stay up for the whole run and take turns, so that a machine that gets slower does so for both.
The load on Triton's side is perf_analyzer, a C++ program, on the same machine: its cost is in the figure.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from loadgen import perf_runs
from loadgen.grpc_client import greedy
from loadgen.latency import duration_s
from loadgen.perf_binary import find_or_install
from loadgen.prompts import prompt

from serving_experiments.bench import Bench, as_requests, ratio_of_medians

CONCURRENCY = 16
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 128
ROUNDS = 3
# All prompts are new; were a round sent again, see `perf_runs.run`, it must find nothing of them in a cache.
SETTINGS = {"enable_prefix_caching": False}


def measure(bench: Bench) -> dict[str, Any]:
    """Alternate the two, `ROUNDS` times after a warm-up; each round has new prompts, the same for both."""
    binary = find_or_install()
    count = CONCURRENCY if bench.quick else 4 * CONCURRENCY
    tokens = 8 if bench.quick else OUTPUT_TOKENS
    rates: dict[str, list[float]] = {"triton": [], "bare": []}
    with (
        bench.server(**SETTINGS) as server,
        bench.engine(**SETTINGS) as engine,
        bench.steps("Triton against the bare engine", ROUNDS + 1) as done,
    ):
        for number in range(ROUNDS + 1):
            prompts = [prompt(PROMPT_TOKENS, 10_000 * (number + 1) + index) for index in range(count)]
            traces = perf_runs.run(
                binary,
                server.grpc_url,
                [greedy(text, tokens) for text in prompts],
                CONCURRENCY,
                model=bench.model_name,
            )
            bare = engine.ask(
                {"requests": as_requests(prompts, [tokens] * count), "concurrency": CONCURRENCY}
            )
            served = sum(trace.num_tokens for trace in traces)
            if not served == bare["tokens"] == tokens * count:
                raise RuntimeError(
                    f"unequal work: Triton {served}, bare {bare['tokens']}, asked {tokens * count}"
                )
            if number:
                rates["triton"].append(served / duration_s(traces))
                rates["bare"].append(bare["tokens"] / bare["seconds"])
            done()
    return {
        "triton_over_bare_c16": ratio_of_medians(rates["triton"], rates["bare"]),
        "concurrency": CONCURRENCY,
        "requests_per_round": count,
        "max_tokens": tokens,
        "prompt_tokens": sorted(set(bare["prompt_tokens"])),
        "torch_threads": engine.ready["torch_threads"],
        "tokens_per_s": {name: [round(rate, 2) for rate in values] for name, values in rates.items()},
        "median_tokens_per_s": {name: round(median(values), 2) for name, values in rates.items()},
    }
