"""The record of a run: figures with everything that they were measured with."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from peers import figures, venvs
from peers.engines import OURS, Engine
from peers.limits import ModelSize
from peers.rounds import Rounds, Seen
from peers.workloads import WORKLOADS


def of_run(rounds: Rounds, size: ModelSize, perplexity: Mapping[str, float] | None) -> dict[str, Any]:
    """Return headline, limits, comparisons and what was seen of each engine."""
    plan = rounds.plan
    rates = figures.common_rates(rounds.rates)
    at_limit = figures.limits(plan, size, rates)
    fractions = figures.fractions(plan, rounds.seen, at_limit)
    compared = figures.comparisons(plan, rounds.seen)
    ours = next((one.name for one in plan.engines_of("16bit") if one.peer == OURS), None)
    return {
        "headline": figures.headline(compared, fractions, rounds.seen.get(ours or ""), perplexity),
        "quick": plan.quick,
        "rounds": plan.rounds,
        "failures": rounds.failures,
        "limits": {
            "read_gb_per_s": [round(rate.bytes_per_s / 1e9, 1) for rate in rounds.rates],
            "bf16_gflop_per_s": [round(rate.operations_per_s / 1e9) for rate in rounds.rates],
            "figures": {key: float(f"{value:.4g}") for key, value in at_limit.items()},
        },
        "comparisons": compared,
        "floor_fractions": fractions,
        "engines": {
            engine.name: record_of(engine, rounds.seen[engine.name], venvs.versions_of(engine.peer))
            for engine in plan.engines
        },
        "workloads": {one.key: f"{one.title}: {one.unit}" for one in WORKLOADS},
    }


def record_of(engine: Engine, seen: Seen, versions: Mapping[str, str]) -> dict[str, Any]:
    """Return everything about one engine that the record keeps."""
    return {
        "weights": engine.weights,
        "versions": dict(versions),
        "settings": dict(engine.options),
        "environment": dict(engine.environment),
        "note": engine.note,
        "ready": seen.ready,
        "startup_s": [round(value, 2) for value in seen.startup_s],
        "peak_gb": round(seen.peak_bytes / 1e9, 2),
        "medians": {key: float(f"{median(values):.4g}") for key, values in seen.figures.items()},
        "figures": {key: [float(f"{one:.4g}") for one in values] for key, values in seen.figures.items()},
        "first_ms": {key: [round(1e3 * one, 2) for one in values] for key, values in seen.first_s.items()},
        "same_tokens_as_ours": seen.agreement,
    }
