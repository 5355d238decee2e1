"""``conch plugins``: what is registered behind each seam, and where it comes from."""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.table import Table

from conch.engine.catalogue import Catalogue

_COLUMNS = ("seam", "name", "plugin", "package", "version")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("plugins", help="list what plugins offer for each seam", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the catalogue. Raises PluginError where a server would not start either."""
    records = Catalogue.load().describe()
    if options.json:
        print(json.dumps(records, indent=2))
        return 0
    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for record in records:
        table.add_row(*(record[column] for column in _COLUMNS))
    Console().print(table)
    return 0
