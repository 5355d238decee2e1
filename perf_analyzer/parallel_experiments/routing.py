"""What each router makes of requests over simulated replicas, and what their caches find.

The routers are the real ones; a replica is a queue, seats and a cache, on a simulated clock
(`conch.testing.replicas`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadgen.worker import Worker
from serving_experiments.bench import Bench

REPLICAS = (2, 4)
ROUTERS = ("least_loaded", "prefix_affinity", "round_robin")
TRACES = ("equal", "every_fourth_long", "burst_after_idling", "shared_prompts")
EVEN = ("equal", "burst_after_idling")
"""Traces that can be spread evenly."""


def measure(bench: Bench) -> dict[str, Any]:
    """Play every trace with every router."""
    counts = REPLICAS[:1] if bench.quick else REPLICAS
    found: dict[str, dict[str, dict[str, Any]]] = {}
    total = len(counts) * len(ROUTERS) * len(TRACES)
    with Worker("routing_worker.py", {}) as worker, bench.steps("routers", total) as done:
        for replicas in counts:
            by_router = found[str(replicas)] = {}
            for router in ROUTERS:
                by_router[router] = {}
                for trace in TRACES:
                    asked = {"router": router, "trace": trace, "replicas": replicas}
                    by_router[router][trace] = worker.ask(asked)
                    done()
    return {
        "dp_max_imbalance": largest_imbalance(found),
        "prefix_affinity_hit_rate": hit_rates(found, "prefix_affinity"),
        "round_robin_hit_rate": hit_rates(found, "round_robin"),
        "by_replicas": found,
    }


def largest_imbalance(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> float:
    """Return how far apart `least_loaded` lets the counts of requests lie, over their mean, at most."""
    return max(
        float(by_router["least_loaded"][trace]["imbalance"]) for by_router in found.values() for trace in EVEN
    )


def hit_rates(found: Mapping[str, Mapping[str, Mapping[str, Any]]], router: str) -> dict[str, float]:
    """Return what share of the prompts' tokens the replicas' caches hold, by number of replicas."""
    return {
        replicas: by_router[router]["shared_prompts"]["hit_rate"] for replicas, by_router in found.items()
    }
