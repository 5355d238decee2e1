"""`make bench-matmul`: all linear layers of a model by themselves, by format and number of rows.

The matrices hold random numbers, but lie in memory as those of the real model do: too much for any cache to
keep from one round to the next.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from loadgen import machine, processes, report
from loadgen.worker import Worker
from rich.table import Table

ROWS = (1, 2, 4, 8, 16, 32, 64, 512)
FORMATS = ("bf16", "Q8_0", "Q4_0", "Q4_1")
LAYERS = 30
LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD = (49152, 576)
MOST_ROWS_OF_HEAD = 64
"""SmolLM2-135M: [columns, depth] of q/k/v, output, gate/up and down; long prompts do without the head."""


def shapes(rows: int) -> list[tuple[int, int]]:
    """Return the matrices that a step of that many rows multiplies with."""
    return [*LAYER * LAYERS, *([HEAD] if rows <= MOST_ROWS_OF_HEAD else [])]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each measurement, the best of four")
    parser.add_argument("--output", type=Path, help="folder for the result")
    return parser.parse_args()


def measure(rows: list[int], seconds: float) -> tuple[dict[str, float], dict[str, dict[int, float]]]:
    """Return bandwidth and bf16 rate, and milliseconds by format and rows."""
    with Worker("matmul_worker.py", {"matrices": shapes(1)}) as worker:
        limits = worker.ask({"limits": True})
        took = {
            name: {
                count: worker.ask(
                    {"format": name, "rows": count, "count": len(shapes(count)), "seconds": seconds}
                )
                for count in rows
            }
            for name in FORMATS
        }
    milliseconds = {name: {count: one["ms"] for count, one in row.items()} for name, row in took.items()}
    return limits, milliseconds


def table_of(milliseconds: dict[str, dict[int, float]], rows: list[int]) -> Table:
    """Return a table with a row for each format."""
    table = Table(title="All linear layers, ms by rows")
    table.add_column("format")
    for count in rows:
        table.add_column(str(count), justify="right")
    for name, row in milliseconds.items():
        table.add_row(name, *(f"{row[count]:.2f}" for count in rows))
    return table


def main() -> int:
    """Run, write, print."""
    processes.unwind_on_sigterm()
    arguments = parse_arguments()
    output, _ = report.consoles()
    environment = machine.describe()
    rows = list(arguments.rows)
    limits, milliseconds = measure(rows, arguments.seconds)
    headline = {
        f"{name}_ms_{count}": round(row[count], 2) for name, row in milliseconds.items() for count in rows
    }
    path = report.write(
        "matmul",
        {"headline": headline, "limits": limits, "ms": milliseconds, **environment},
        arguments.output,
    )
    output.print(table_of(milliseconds, rows))
    output.print({name: round(value, 1) for name, value in limits.items()})
    output.print(f"written to {path}", markup=False, soft_wrap=True)
    report.print_last_line(output, headline)
    return 0


if __name__ == "__main__":
    sys.exit(main())
