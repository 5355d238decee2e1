"""Where results go: one JSON for each run, one table for people, one last line for programs."""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from loadgen import machine

RESULTS = Path(__file__).resolve().parents[1] / "results"
WIDTH = 120
_NUMBERS = re.compile(r"\[[^\[\]{}\"]*\]")


def write(name: str, result: Mapping[str, Any], folder: Path | None = None) -> Path:
    """Write a result as ``<folder or results/name>/<date>-<cpu>.json`` and return the path.

    A later run of the same day on the same processor gets a number, so that nothing is overwritten.
    """
    where = folder or RESULTS / name
    where.mkdir(parents=True, exist_ok=True)
    stem = f"{datetime.date.today().isoformat()}-{machine.cpu_slug()}"
    path = where / f"{stem}.json"
    number = 2
    while path.exists():
        path = where / f"{stem}-{number}.json"
        number += 1
    path.write_text(_NUMBERS.sub(_on_one_line, json.dumps(result, indent=1)) + "\n")
    return path


def _on_one_line(array: re.Match[str]) -> str:
    return " ".join(array.group().split()).replace("[ ", "[").replace(" ]", "]")


def latency_table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table with a row for each summary (see `latency.summarise`)."""
    table = Table(title=title)
    table.add_column("")
    for heading in (
        "requests",
        "tokens/s",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "TPOT p99",
        "ITL p50",
        "ITL p99",
    ):
        table.add_column(heading, justify="right")
    for label, summary in rows.items():
        spreads = [summary[key] or {} for key in ("ttft_ms", "tpot_ms", "itl_ms")]
        cells = [_number(spread.get(rank)) for spread in spreads for rank in ("p50", "p99")]
        table.add_row(label, str(summary["requests"]), _number(summary["tokens_per_s"]), *cells)
    table.caption = "milliseconds unless said otherwise"
    return table


def headline_table(title: str, headline: Mapping[str, Any], meaning: Mapping[str, str]) -> Table:
    """Return a table of headline figures with one line on what each means."""
    table = Table(title=title)
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("meaning")
    for key, value in headline.items():
        table.add_row(key, _number(value), meaning.get(key, ""))
    return table


def nested_table(title: str, headline: Mapping[str, Any], meaning: Mapping[str, str]) -> Table:
    """Return a table of headline figures; those that are by something have a row for each."""
    table = Table(title=title)
    for column in ("figure", "of", "value", "meaning"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for key, value in headline.items():
        table.add_section()
        for index, (label, number) in enumerate(flat(value)):
            first = (key, meaning[key]) if index == 0 else ("", "")
            table.add_row(first[0], label, "-" if number is None else f"{number:.4g}", first[1])
    return table


def flat(value: Any, label: str = "") -> list[tuple[str, float | None]]:  # noqa: ANN401 - a figure or a dict of such
    """Return the figures of a dict of dicts, each with the keys that lead to it."""
    if not isinstance(value, Mapping):
        return [(label, value)]
    return [one for key, inner in value.items() for one in flat(inner, f"{label} {key}".strip())]


def _number(value: object) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def consoles() -> tuple[Console, Console]:
    """Return the console for results, and the one for progress; wide where nobody looks at a terminal."""
    return _console(sys.stdout), _console(sys.stderr)


def _console(stream: TextIO) -> Console:
    return Console(file=stream, width=None if stream.isatty() else WIDTH)


def print_last_line(console: Console, headline: Mapping[str, Any]) -> None:
    """Print the headline as the last line, JSON and unwrapped."""
    console.print(json.dumps(dict(headline)), soft_wrap=True, markup=False, highlight=False)
