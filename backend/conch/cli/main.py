"""The `conch` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import conch
from conch.api.errors import ConchError
from conch.cli import doctor, generate, plugins, rank, repository, serve, topology, train_eagle

_COMMANDS = (serve, generate, plugins, repository, topology, rank, train_eagle, doctor)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="conch", description="LLM serving inside NVIDIA Triton Inference Server.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"conch {conch.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        module.add_command(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an error of the user's is one line on stderr."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and not getattr(options, "takes_server_flags", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.server_flags = rest
    try:
        return int(options.run(options))
    except ConchError as error:
        print(f"conch: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
