"""What people read at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from peers.engines import WEIGHTS
from peers.rounds import Plan, Seen
from peers.workloads import WORKLOADS


def engine_table(plan: Plan, seen: Mapping[str, Seen], at_limit: Mapping[str, float]) -> Table:
    """Return a row for each engine, and one for the limit of each kind of weights."""
    table = Table(title="Peers: medians, and the spread from lowest to highest in per cent of them")
    for heading in ("engine", "start s", "peak GB", "W1 TTFT ms"):
        table.add_column(heading, justify="right" if heading != "engine" else "left")
    for workload in WORKLOADS:
        table.add_column(f"{workload.key.upper()} {'s' if workload.smaller_is_better else 'tok/s'}")
    for weights in (kind for kind in WEIGHTS if plan.engines_of(kind)):
        for engine in plan.engines_of(weights):
            table.add_row(engine.name, *_cells(seen[engine.name]))
        limit = [at_limit.get(f"{workload.key}_{weights}") for workload in WORKLOADS]
        shown = [f"{value:.4g}" if value is not None else "-" for value in limit]
        table.add_row(f"limit, {weights}", "", "", "", *shown, style="dim", end_section=True)
    table.caption = "; ".join(f"{workload.key.upper()}: {workload.title}" for workload in WORKLOADS)
    return table


def comparison_table(compared: Mapping[str, Mapping[str, Any]], fractions: Mapping[str, float]) -> Table:
    """Return ratios with their spread."""
    table = Table(title="Ours over the best peer, same run")
    for heading in ("", "ratio", "lowest", "highest", "best peer", "of the limit"):
        table.add_column(heading)
    for key, found in compared.items():
        values = [found.get(name) for name in ("ratio", "lowest", "highest", "best_peer")]
        shown = ["-" if value is None else str(value) for value in values]
        table.add_row(key, *shown, str(fractions.get(key, "-")))
    return table


def _cells(seen: Seen) -> list[str]:
    first = seen.first_s.get("w1")
    return [
        f"{median(seen.startup_s):.1f}" if seen.startup_s else "-",
        f"{seen.peak_bytes / 1e9:.1f}" if seen.peak_bytes else "-",
        f"{1e3 * median(first):.1f}" if first else "-",
        *(with_spread(seen.figures.get(workload.key, [])) for workload in WORKLOADS),
    ]


def with_spread(values: Sequence[float]) -> str:
    """Return a median with the distance of the lowest from the highest beside it."""
    if not values:
        return "-"
    middle = median(values)
    spread = f" ±{50 * (max(values) - min(values)) / middle:.0f}%" if len(values) > 1 else ""
    return f"{middle:.4g}{spread}"
