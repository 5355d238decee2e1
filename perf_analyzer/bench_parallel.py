"""`make bench-parallel`: what routers make of replicas, in simulation.

Writes one JSON, prints one table, and last a line of JSON with the headline figures.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from loadgen import machine, processes, report
from loadgen.worker import Worker
from rich.table import Table

REPLICAS = (2, 4)
ROUTERS = ("least_loaded", "prefix_affinity", "round_robin")
TRACES = ("equal", "every_fourth_long", "burst_after_idling", "shared_prompts")
HEADLINE = {
    "dp_max_imbalance": "least_loaded, equal requests and a burst: how far counts lie apart, over their mean",
    "prefix_affinity_hit_rate": "prompt tokens found in the replicas' caches, shared prompts, by replicas",
    "round_robin_hit_rate": "the same, each replica in turn",
}


def measure() -> dict[str, Any]:
    """Play every trace with every router."""
    with Worker("routing_worker.py", {}) as worker:
        return {
            str(replicas): {
                router: {
                    trace: worker.ask({"router": router, "trace": trace, "replicas": replicas})
                    for trace in TRACES
                }
                for router in ROUTERS
            }
            for replicas in REPLICAS
        }


def headline_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that are told first."""
    even = ("equal", "burst_after_idling")
    return {
        "dp_max_imbalance": max(
            by_router["least_loaded"][trace]["imbalance"] for by_router in found.values() for trace in even
        ),
        **{
            f"{router}_hit_rate": {
                replicas: by_router[router]["shared_prompts"]["hit_rate"]
                for replicas, by_router in found.items()
            }
            for router in ("prefix_affinity", "round_robin")
        },
    }


def table_of(found: dict[str, Any]) -> Table:
    """Return a table with a row for each trace, router and number of replicas."""
    table = Table(title="Routers over simulated replicas")
    table.add_column("replicas")
    table.add_column("router")
    table.add_column("trace")
    for heading in ("imbalance", "waiting beside idle", "hit rate"):
        table.add_column(heading, justify="right")
    for replicas, by_router in found.items():
        for router, by_trace in by_router.items():
            table.add_section()
            for trace, one in by_trace.items():
                figures = (one["imbalance"], one["most_waiting_beside_idle"], one["hit_rate"])
                table.add_row(replicas, router, trace, *(f"{figure:.3g}" for figure in figures))
    return table


def main() -> int:
    """Run, write, print."""
    processes.unwind_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="folder for the result (default: results/parallel)")
    arguments = parser.parse_args()
    output, _ = report.consoles()
    found = measure()
    headline = headline_of(found)
    result = {"headline": headline, **machine.describe(), "experiments": {"routing": found}}
    path = report.write("parallel", result, arguments.output)
    output.print(table_of(found))
    for key, meaning in HEADLINE.items():
        output.print(f"{key}: {meaning}", markup=False)
    output.print(f"written to {path}", markup=False, soft_wrap=True)
    report.print_last_line(output, headline)
    return 0


if __name__ == "__main__":
    sys.exit(main())
