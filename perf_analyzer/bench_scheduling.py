"""`make bench-scheduling`: scheduling and KV memory, with and without a model.

Writes one JSON and a plot, prints one table, and last a line of JSON with the headline figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bench_serving
from loadgen import machine, processes, report
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

EXPERIMENTS = (
    "planning_cost",
    "hit_rate",
    "zero_hit_cost",
    "fairness",
    "slo_attainment",
    "kv_waste",
    "long_prompt",
)
HEADLINE = {
    "plan_us_per_row": "host's work on a decode step, microseconds a row, by rows",
    "plan_over_vllm": "the same over vLLM's own scheduler on the same trace, by rows",
    "kv_waste_fraction": "allocated KV slots that hold nothing, mixed lengths",
    "itl_p99_chunked_over_quiet": "decode p99 ITL while a 6,000-token prompt arrives, over quiet",
    "hit_rate_over_oracle": "tokens found over those that a perfect, endless cache finds, by cache",
    "zero_hit_cost": "tokens/s with a prefix cache that finds nothing, over without",
    "fair_service_gap_over_bound": "most that two tenants' service differs, over the VTC paper's bound",
    "slo_attainment": "requests whose targets are met, by load and scheduler, simulated",
}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="smoke run: exercises everything, measures nothing"
    )
    parser.add_argument(
        "--only", action="append", choices=EXPERIMENTS, help="run this experiment; may be repeated"
    )
    parser.add_argument("--model", help="folder or GGUF file; the default is that of `conch serve`")
    parser.add_argument("--model-name", default="smollm2", help="what the server calls it")
    parser.add_argument("--dtype", default="bfloat16", help="of weights, activations and KV")
    parser.add_argument("--serve-command", help="what starts a server; the default is `conch serve`")
    parser.add_argument(
        "--output", type=Path, help="folder for the result (default: results/scheduling, or .cache/quick)"
    )
    return parser.parse_args()


def figures_table(title: str, headline: Mapping[str, Any]) -> Table:
    """Return a table with a row for each figure, those by rows, cache or load one below the other."""
    table = Table(title=title)
    for column in ("figure", "of", "value", "meaning"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for key, value in headline.items():
        table.add_section()
        for index, (label, number) in enumerate(flat(value)):
            first = (key, HEADLINE[key]) if index == 0 else ("", "")
            table.add_row(first[0], label, "-" if number is None else f"{number:.4g}", first[1])
    return table


def flat(value: Any, label: str = "") -> list[tuple[str, float | None]]:  # noqa: ANN401 - a figure or a dict of such
    """Return the figures of a dict of dicts, each with the keys that lead to it."""
    if not isinstance(value, Mapping):
        return [(label, value)]
    return [one for key, inner in value.items() for one in flat(inner, f"{label} {key}".strip())]


def draw(results: Mapping[str, Any], path: Path) -> str | None:
    """Draw what is better seen than read beside the result; returns why not, where matplotlib is missing."""
    if "slo_attainment" not in results:
        return None
    try:
        from scheduling_experiments.plots import attainment_against_load
    except ImportError as error:
        return f"not drawn: {error}; pip install 'conch[bench]'"
    attainment_against_load(results["slo_attainment"], path.with_name(f"{path.stem}-attainment.png"))
    return None


def main() -> int:
    """Run, write, print."""
    processes.unwind_on_sigterm()
    arguments = parse_arguments()
    output, errors = report.consoles()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    environment = machine.describe()
    with Progress(*columns, console=errors) as progress:
        bench = bench_serving.make_bench(arguments, progress)
        names = arguments.only or list(EXPERIMENTS)
        results, failures = bench_serving.run(bench, names, errors, "scheduling_experiments")
    found = {key: value for result in results.values() for key, value in result.items()}
    headline = {key: found.get(key) for key in HEADLINE}
    path = report.write(
        "scheduling",
        {
            "headline": headline,
            "quick": bench.quick,
            "model": Path(bench.model_path).name,
            "dtype": bench.dtype,
            **environment,
            "failures": failures,
            "experiments": results,
        },
        arguments.output or (machine.ROOT / ".cache" / "quick" if bench.quick else None),
    )
    output.print(figures_table("Scheduling" + (" (quick: not a measurement)" * bench.quick), headline))
    if excuse := draw(results, path):
        output.print(excuse, markup=False)
    output.print(f"written to {path}", markup=False, soft_wrap=True)
    report.print_last_line(output, headline)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
