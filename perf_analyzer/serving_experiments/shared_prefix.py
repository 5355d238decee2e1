"""TTFT of requests that share a long prefix, with the prefix cache on and off.

One request with the prefix has been served before; then all come at once. A burst whose prefix nobody has
seen is reported too: there the cache helps only those that are admitted after the first is computed.
"""

from __future__ import annotations

import asyncio
from statistics import median
from typing import Any

from loadgen import prometheus
from loadgen.grpc_client import LoadClient, greedy
from loadgen.latency import Trace, spread_ms
from loadgen.prompts import shared_prefix_prompts

from serving_experiments.bench import Bench, ratio_of_medians

REQUESTS = 32
SHARED_TOKENS = 1_024
OWN_TOKENS = 16
ROUNDS = 3
# Room for all of them without sharing: else "off" would measure preemption too.
KV_BYTES = 2 << 30


async def burst(client: LoadClient, prompts: list[str]) -> list[float]:
    """Send all at once and return their TTFT in seconds."""
    traces: list[Trace] = await asyncio.gather(*(client.stream(greedy(text, 2)) for text in prompts))
    times = [trace.ttft_s for trace in traces if trace.ttft_s is not None]
    if len(times) < len(prompts):
        raise RuntimeError(f"requests without a token: {[trace.error for trace in traces if trace.error]}")
    return times


async def play(client: LoadClient, rounds: int, shared_tokens: int) -> dict[str, Any]:
    """Play the bursts against one server."""
    await burst(client, shared_prefix_prompts(2, 32, 4, seed=1))
    cold = await burst(client, shared_prefix_prompts(REQUESTS, shared_tokens, OWN_TOKENS, seed=2))
    warm: list[list[float]] = []
    for number in range(rounds):
        primer, *prompts = shared_prefix_prompts(REQUESTS + 1, shared_tokens, OWN_TOKENS, seed=3 + number)
        await burst(client, [primer])
        warm.append(await burst(client, prompts))
    return {
        "round_median_ttft_s": [round(median(times), 5) for times in warm],
        "warm_ttft_ms": spread_ms([time for times in warm for time in times]),
        "cold_ttft_ms": spread_ms(cold),
    }


def measure(bench: Bench) -> dict[str, Any]:
    """Play the same bursts on a server with the cache and on one without."""
    rounds, shared_tokens = (1, 64) if bench.quick else (ROUNDS, SHARED_TOKENS)
    results: dict[str, Any] = {}
    with bench.steps("a shared prefix", 2) as done:
        for name in ("on", "off"):
            with bench.server(enable_prefix_caching=name == "on", kv_cache_memory_bytes=KV_BYTES) as server:
                figures = bench.with_client(server, lambda client: play(client, rounds, shared_tokens))
                hits = prometheus.read(prometheus.fetch(server.metrics_url), prometheus.PREFIX_HITS)
            results[name] = {**figures, "prefix_hit_tokens": hits}
            done()
    if not results["on"]["prefix_hit_tokens"] or results["off"]["prefix_hit_tokens"]:
        raise RuntimeError(f"the prefix cache was not what it was to be: {results}")
    return {
        "ttft_shared_prefix_on_over_off": ratio_of_medians(
            results["on"]["round_median_ttft_s"], results["off"]["round_median_ttft_s"]
        ),
        "requests": REQUESTS,
        "shared_tokens": shared_tokens,
        "own_tokens": OWN_TOKENS,
        "modes": results,
    }
