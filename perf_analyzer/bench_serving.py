"""`make bench-serving`: all serving experiments in one run, one JSON, one table, one last line of JSON."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from loadgen import machine, processes, report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from serving_experiments.bench import DEMO_MODEL, Bench

EXPERIMENTS = (
    "concurrency_sweep",
    "triton_over_bare",
    "one_stream",
    "static_batching",
    "chunked_prefill",
    "shared_prefix",
    "kv_waste",
)
HEADLINE = {
    "triton_over_bare_c16": "tokens/s through Triton over the engine in process, 16 at a time",
    "triton_in_pieces_over_bare_c16": "the same with stream_interval 4",
    "triton_adds_ms_c1": "milliseconds that Triton adds to the time of a token, one stream",
    "continuous_over_static": "tokens/s over transformers.generate, padded batches of the same size",
    "itl_p99_chunked_over_quiet": "decode p99 ITL while a 4,000-token prompt arrives, over quiet",
    "itl_p99_unchunked_over_quiet": "the same without chunked prefill",
    "ttft_shared_prefix_on_over_off": "median TTFT of 32 requests sharing 1,024 tokens, cache on over off",
    "kv_waste_fraction": "allocated KV slots that hold nothing, mixed lengths",
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
    parser.add_argument("--dtype", default="bfloat16", help="of weights, activations and KV in all programs")
    parser.add_argument("--serve-command", help="what starts a server; the default is `conch serve`")
    parser.add_argument(
        "--output", type=Path, help="folder for the result (default: results/serving, or .cache/quick)"
    )
    return parser.parse_args()


def make_bench(arguments: argparse.Namespace, progress: Progress) -> Bench:
    """Settle what is measured."""
    default_command = f"{Path(sys.executable).parent / 'conch'} serve"
    command = shlex.split(arguments.serve_command or default_command)
    if arguments.model:
        command += ["--model", arguments.model]
    return Bench(
        serve_command=tuple(command),
        model_path=arguments.model or DEMO_MODEL,
        progress=progress,
        dtype=arguments.dtype,
        model_name=arguments.model_name,
        quick=arguments.quick,
    )


def run(
    bench: Bench, names: list[str], console: Console, package: str = "serving_experiments"
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run experiments of a package; one that fails is reported, and does not take the others with it."""
    results: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for name in names:
        began = time.monotonic()
        try:
            results[name] = importlib.import_module(f"{package}.{name}").measure(bench)
            results[name]["wall_s"] = round(time.monotonic() - began, 1)
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
            console.print(f"[red]{name} failed[/red]")
            console.print(failures[name], markup=False)
    return results, failures


def main() -> int:
    """Run, write, print."""
    processes.unwind_on_sigterm()
    arguments = parse_arguments()
    output, errors = report.consoles()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    environment = machine.describe()
    with Progress(*columns, console=errors) as progress:
        bench = make_bench(arguments, progress)
        results, failures = run(bench, arguments.only or list(EXPERIMENTS), errors)
    found = {key: value for result in results.values() for key, value in result.items()}
    headline = {key: found.get(key) for key in HEADLINE}
    path = report.write(
        "serving",
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
    if "concurrency_sweep" in results:
        output.print(report.latency_table("Concurrency", results["concurrency_sweep"]["concurrency"]))
    output.print(
        report.headline_table("Serving" + (" (quick: not a measurement)" * bench.quick), headline, HEADLINE)
    )
    output.print(f"written to {path}", markup=False, soft_wrap=True)
    report.print_last_line(output, headline)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
