"""`make bench-engine-overhead`: what a decode step costs beside the model, in microseconds, by part."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from loadgen import machine, processes, report
from loadgen.worker import Worker
from rich.table import Table

ROWS = (1, 16, 32)
STEPS = 400
PROMPT_TOKENS = 128
SETTINGS = {"max_num_seqs": 64, "num_gpu_blocks_override": 4096}
HEADLINE = {
    "overhead_us_1": "microseconds a step, one greedy row, model aside",
    "overhead_us_16": "16 greedy rows",
    "overhead_us_32": "32 greedy rows",
    "sampled_us_32": "32 rows at temperature 0.8, top_p 0.95",
}
GREEDY = {"temperature": 0.0}
RANDOM = {"temperature": 0.8, "top_p": 0.95}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of each case")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="a key of model.json")
    parser.add_argument("--output", type=Path, help="folder for the result")
    return parser.parse_args()


def cases(steps: int) -> dict[str, dict[str, Any]]:
    """Return the questions by name."""
    greedy = {f"overhead_us_{rows}": {"rows": rows, "steps": steps, "params": GREEDY} for rows in ROWS}
    return {**greedy, "sampled_us_32": {"rows": 32, "steps": max(10, steps // 10), "params": RANDOM}}


def measure(worker: Worker, steps: int) -> dict[str, dict[str, Any]]:
    """Ask for every case."""
    return {
        name: worker.ask({"prompt_tokens": PROMPT_TOKENS, **question})
        for name, question in cases(steps).items()
    }


def parts_table(results: dict[str, dict[str, Any]]) -> Table:
    """Return a table with a row for each part; watching adds about 1 us to each."""
    table = Table(title="Microseconds a step")
    table.add_column("part")
    for name in results:
        table.add_column(name, justify="right")
    for part in next(iter(results.values()))["parts_us"]:
        table.add_row(part, *(f"{result['parts_us'][part]:.1f}" for result in results.values()))
    table.add_section()
    table.add_row("whole, not watched", *(f"{result['us_per_step']:.1f}" for result in results.values()))
    return table


def main() -> int:
    """Run, write, print."""
    processes.unwind_on_sigterm()
    arguments = parse_arguments()
    output, _ = report.consoles()
    environment = machine.describe()
    settings = {**SETTINGS, **dict(parse_assignment(text) for text in arguments.set)}
    with Worker("overhead_worker.py", {"settings": settings}) as worker:
        results = measure(worker, arguments.steps)
        threads = worker.ready["threads"]
    headline = {name: round(results[name]["us_per_step"], 1) for name in HEADLINE}
    path = report.write(
        "engine_overhead",
        {"headline": headline, "settings": settings, "threads": threads, **environment, "cases": results},
        arguments.output,
    )
    output.print(parts_table(results))
    output.print(f"written to {path}", markup=False, soft_wrap=True)
    report.print_last_line(output, headline)
    return 0


def parse_assignment(text: str) -> tuple[str, Any]:
    """Split ``key=value``; the value is JSON where it parses as such, else a string."""
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


if __name__ == "__main__":
    sys.exit(main())
