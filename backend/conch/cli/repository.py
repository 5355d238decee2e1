"""``conch repository create``: a Triton model repository for a model and a topology."""

from __future__ import annotations

import argparse
from pathlib import Path

from conch.cli.common import add_model_options, default_name, model_reference, settings_from
from conch.host.serving.repository import ModelEntry, write_model


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("repository", help="write Triton model repositories", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = actions.add_parser(
        "create",
        help="write a model into a repository",
        description="Write config.pbtxt and 1/model.json for a model into the repository DIR, which is made "
        "where needed.",
        allow_abbrev=False,
    )
    add_model_options(create)
    create.add_argument(
        "--name", metavar="NAME", help="what clients call the model (default: its file's name)"
    )
    create.add_argument(
        "--instances",
        type=int,
        default=1,
        metavar="N",
        help="engines that serve the model, each with its own copy: data parallel (default: 1)",
    )
    create.add_argument("directory", type=Path, metavar="DIR")
    create.set_defaults(run=run_create)


def run_create(options: argparse.Namespace) -> int:
    """Write the model and print what was written."""
    settings = {"model": model_reference(options.model), **settings_from(options)}
    entry = ModelEntry(options.name or default_name(options.model), settings, options.instances)
    for path in write_model(options.directory, entry):
        print(f"{path}:")
        print("".join(f"    {line}\n" for line in path.read_text(encoding="utf-8").splitlines()), end="")
    print(f"serve it with: conch serve --repository {options.directory}")
    return 0
