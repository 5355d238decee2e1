"""``conch doctor``: what is missing on this machine, and how to install it."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from conch.cli.checks import Level, all_findings

_STYLES = {Level.GOOD: "green", Level.LACKING: "yellow", Level.BAD: "bold red"}


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="say what is missing and how to install it",
        description="Check what serving needs. The exit code is 1 if serving would fail.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print all findings; return 1 if one of them rules serving out."""
    findings = list(all_findings())
    table = Table("", "", Column(overflow="fold"), box=None, show_header=False, pad_edge=False)
    for finding in findings:
        detail = Text(finding.detail)
        if finding.remedy:
            detail.append(f"\n-> {finding.remedy}")
        table.add_row(Text(finding.level.value, style=_STYLES[finding.level]), Text(finding.subject), detail)
    Console().print(table)
    return int(any(finding.level is Level.BAD for finding in findings))
