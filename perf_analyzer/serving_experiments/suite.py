"""What the benchmarks of several experiments have in common: command line, running them, and the record."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen import machine, report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from serving_experiments.bench import DEMO_MODEL, Bench


@dataclass(frozen=True)
class Outcome:
    """What a suite found, and where it is written."""

    headline: Mapping[str, Any]
    results: Mapping[str, Any]
    failures: Mapping[str, str]
    path: Path
    quick: bool


@dataclass(frozen=True)
class Suite:
    """Some experiments: modules of a package, each with a `measure`.

    Attributes
    ----------
    name
        Of its folder of results; the package is called after it.
    experiments
        In the order in which they run.
    headline
        Keys of the figures that are told first.
    """

    name: str
    experiments: Sequence[str]
    headline: Sequence[str]

    def parse_arguments(self, description: str | None) -> argparse.Namespace:
        """Read the command line."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument(
            "--quick", action="store_true", help="smoke run: exercises everything, measures nothing"
        )
        parser.add_argument(
            "--only", action="append", choices=self.experiments, help="run this experiment; may be repeated"
        )
        parser.add_argument("--model", help="folder or GGUF file; the default is that of `conch serve`")
        parser.add_argument("--model-name", default="smollm2", help="what the server calls it")
        parser.add_argument(
            "--dtype", default="bfloat16", help="of weights, activations and KV in all programs"
        )
        parser.add_argument("--serve-command", help="what starts a server; the default is `conch serve`")
        parser.add_argument(
            "--output",
            type=Path,
            help=f"folder for the result (default: results/{self.name}, or .cache/quick)",
        )
        return parser.parse_args()

    def run(self, arguments: argparse.Namespace, errors: Console) -> Outcome:
        """Run what is asked for and write it down."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        environment = machine.describe()
        with Progress(*columns, console=errors) as progress:
            bench = _make_bench(arguments, progress)
            results, failures = self._run_all(bench, arguments.only or self.experiments, errors)
        found = {key: value for result in results.values() for key, value in result.items()}
        headline = {key: found.get(key) for key in self.headline}
        path = report.write(
            self.name,
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
        return Outcome(headline, results, failures, path, bench.quick)

    def _run_all(
        self, bench: Bench, names: Sequence[str], console: Console
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Run experiments; one that fails is reported, and does not take the others with it."""
        results: dict[str, Any] = {}
        failures: dict[str, str] = {}
        for name in names:
            began = time.monotonic()
            try:
                module = importlib.import_module(f"{self.name}_experiments.{name}")
                results[name] = module.measure(bench)
                results[name]["wall_s"] = round(time.monotonic() - began, 1)
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"
                console.print(f"[red]{name} failed[/red]")
                console.print(failures[name], markup=False)
        return results, failures


def title_of(outcome: Outcome, title: str) -> str:
    """Return the title of the table of an outcome."""
    return title + (" (quick: not a measurement)" * outcome.quick)


def _make_bench(arguments: argparse.Namespace, progress: Progress) -> Bench:
    """Settle what is measured."""
    default_command = f"{Path(sys.executable).parent / 'conch'} serve"
    program = shlex.split(arguments.serve_command or default_command)
    return Bench(
        program=tuple(program),
        serve_command=(*program, *(["--model", arguments.model] if arguments.model else [])),
        model_path=arguments.model or DEMO_MODEL,
        progress=progress,
        dtype=arguments.dtype,
        model_name=arguments.model_name,
        quick=arguments.quick,
    )
