"""From what was seen to ratios and fractions of the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from peers.engines import OURS, WEIGHTS, Engine
from peers.limits import ModelSize, Rates, floor_figure, floor_fraction
from peers.rounds import Plan, Seen
from peers.workloads import BY_KEY

HEADLINE_KEYS = (
    "w1_16bit",
    "w2_16bit",
    "w3_16bit",
    "w4_16bit",
    "w1_int8",
    "w2_int8",
    "w1_4bit",
    "w2_4bit",
)
MEANING = {
    "ratio": "ours over the best peer of that workload and those weights; over 1 is better for us",
    "floor_fraction": "share of what the machine allows; 1 is the limit, none where no limit is defined",
    "startup_s": "process start to first token, ours, 16 bit",
    "peak_gb": "peak resident memory of our process, 16 bit",
    "perplexity": "on a fixed text, by weights",
}


def common_rates(rates: Sequence[Rates]) -> Rates:
    """Return the medians of what was measured between rounds; each is the best of several tries."""
    return Rates(median(rate.bytes_per_s for rate in rates), median(rate.operations_per_s for rate in rates))


def ratios(ours: Sequence[float], theirs: Sequence[float], smaller_is_better: bool) -> list[float]:
    """Return how many times better ours was, round by round."""
    pairs = zip(ours, theirs, strict=False)
    return [right / left if smaller_is_better else left / right for left, right in pairs]


def best_peer(
    names: Sequence[str], values: Mapping[str, Sequence[float]], smaller_is_better: bool
) -> str | None:
    """Return the peer with the best median of those that have one."""
    medians = {name: median(values[name]) for name in names if values.get(name)}
    if not medians:
        return None
    return (min if smaller_is_better else max)(medians, key=lambda name: medians[name])


def compare(engines: Sequence[Engine], seen: Mapping[str, Seen], key: str, first: bool) -> dict[str, Any]:
    """Return ours over the best peer for one workload, or for its time to the first token."""
    smaller = first or BY_KEY[key].smaller_is_better
    values = {
        engine.name: (seen[engine.name].first_s if first else seen[engine.name].figures).get(key, [])
        for engine in engines
    }
    ours = next((engine.name for engine in engines if engine.peer == OURS), None)
    peer = best_peer([engine.name for engine in engines if engine.peer != OURS], values, smaller)
    if ours is None or peer is None or not values[ours]:
        return {"ratio": None, "best_peer": peer}
    found = ratios(values[ours], values[peer], smaller)
    return {
        "ratio": round(median(found), 3),
        "lowest": round(min(found), 3),
        "highest": round(max(found), 3),
        "best_peer": peer,
    }


def comparisons(plan: Plan, seen: Mapping[str, Seen]) -> dict[str, dict[str, Any]]:
    """Return every comparison, by workload and weights; ``ttft_w1_...`` is the time to the first token."""
    found = {}
    for weights in WEIGHTS:
        engines = plan.engines_of(weights)
        for workload in plan.workloads if engines else ():
            found[f"{workload.key}_{weights}"] = compare(engines, seen, workload.key, first=False)
            if workload.key == "w1":
                found[f"ttft_w1_{weights}"] = compare(engines, seen, "w1", first=True)
    return found


def limits(plan: Plan, size: ModelSize, rates: Rates) -> dict[str, float]:
    """Return the figure of each workload at the limits, by workload and weights, where there is one."""
    found = {}
    for weights in WEIGHTS:
        for workload in plan.workloads if plan.engines_of(weights) else ():
            floor = floor_figure(workload.key, weights, workload.work(1, plan.quick), size, rates)
            if floor is not None:
                found[f"{workload.key}_{weights}"] = floor
    return found


def fractions(plan: Plan, seen: Mapping[str, Seen], at_limit: Mapping[str, float]) -> dict[str, float]:
    """Return how near our engine comes to each limit."""
    found = {}
    for engine in plan.engines:
        for key, values in seen[engine.name].figures.items() if engine.peer == OURS else ():
            name = f"{key}_{engine.weights}"
            if name in at_limit:
                smaller = BY_KEY[key].smaller_is_better
                found[name] = round(floor_fraction(median(values), at_limit[name], smaller), 3)
    return found


def headline(
    compared: Mapping[str, Mapping[str, Any]],
    fractions: Mapping[str, float],
    ours: Seen | None,
    perplexity: Mapping[str, float] | None,
) -> dict[str, Any]:
    """Return the headline figures; what was not measured is None."""
    started = ours.startup_s if ours else []
    return {
        "ratio": {key: compared.get(key, {}).get("ratio") for key in HEADLINE_KEYS},
        "floor_fraction": {key: fractions.get(key) for key in HEADLINE_KEYS},
        "startup_s": round(median(started), 2) if started else None,
        "peak_gb": round(ours.peak_bytes / 1e9, 2) if ours and ours.peak_bytes else None,
        "perplexity": dict(perplexity) if perplexity else None,
    }
