"""``conch repository create``: a Triton model repository for a model and a topology."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conch.api.config import EngineConfig, parse_config
from conch.api.errors import ConfigError
from conch.api.mesh_config import ranks_here, shape_of
from conch.cli.common import add_model_options, default_name, model_reference, settings_from
from conch.cli.division import (
    add_division_options,
    division_from,
    model_from,
    note_on_stages,
    rank_holdings,
    table_of_ranks,
)
from conch.host.devices import divide_devices, parse_device_groups
from conch.host.serving.repository import ModelEntry, write_model


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("repository", help="write Triton model repositories", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = actions.add_parser(
        "create",
        help="write a model into a repository",
        description="Write config.pbtxt and 1/model.json for a model into the repository DIR, which is made "
        "where needed, and show what runs where.",
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
        help="instances of the model, over which Triton goes round, each with its own weights (default: 1)",
    )
    add_division_options(create)
    create.add_argument(
        "--gpus", metavar="N,N,...", help="devices for all ranks, in the order of instances, replicas, ranks"
    )
    create.add_argument("--drafter", metavar="NAME", help="who drafts tokens ahead: ngram, suffix, ...")
    create.add_argument("directory", type=Path, metavar="DIR")
    create.set_defaults(run=run_create)


def run_create(options: argparse.Namespace) -> int:
    """Write the model and print what was written, and what runs where."""
    settings = _settings(options)
    devices = _device_groups(options.gpus, options.instances)
    entry = ModelEntry(
        options.name or default_name(model_from(options)), settings, options.instances, devices
    )
    config = parse_config(settings)
    ranks = None
    if shape_of(config).size > 1:  # what cannot be divided is refused here, before anything is written
        _, holdings = rank_holdings(config)
        ranks = table_of_ranks(holdings)
    console = Console()
    for path in write_model(options.directory, entry):
        print(f"{path}:")
        print("".join(f"    {line}\n" for line in path.read_text(encoding="utf-8").splitlines()), end="")
    console.print(_table_of_places(config, entry))
    if ranks is not None:
        console.print(ranks)
        console.print(note_on_stages(config), soft_wrap=True, highlight=False)
    print(f"serve it with: conch serve --repository {options.directory}")
    return 0


def places(
    config: EngineConfig, instances: int, devices: list[tuple[int, ...]]
) -> list[tuple[int, int, int, str]]:
    """Return instance, replica, rank and device of each process that computes."""
    size = shape_of(config).size
    found = []
    for instance in range(instances):
        of_replicas = divide_devices(devices[instance], config) if devices else None
        for replica in range(config.data_parallel_size):
            for rank in range(size):
                device = config.device if of_replicas is None else f"GPU {of_replicas[replica][rank]}"
                is_here = rank < ranks_here(config)
                found.append((instance, replica, rank, device if is_here else "another host"))
    return found


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    settings = {"model": model_reference(model_from(options)), **division_from(options)}
    if options.drafter is not None:
        settings["speculative_config"] = {"method": options.drafter}
    return {**settings, **settings_from(options)}


def _device_groups(text: str | None, instances: int) -> list[tuple[int, ...]]:
    """Divide devices among instances."""
    if text is None:
        return []
    groups = parse_device_groups(text)
    if len(groups) > 1:
        raise ConfigError(f"--gpus must be device numbers like 0,1,2,3, not {text!r}")
    (numbers,) = groups
    if instances < 1 or len(numbers) % instances:
        raise ConfigError(
            f"--gpus {text}: {len(numbers)} devices cannot be divided among {instances} instances"
        )
    each = len(numbers) // instances
    return [numbers[first : first + each] for first in range(0, len(numbers), each)]


def _table_of_places(config: EngineConfig, entry: ModelEntry) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("instance", "replica", "rank", "device"):
        table.add_column(column, justify="left" if column == "device" else "right")
    for instance, replica, rank, device in places(config, entry.instances, list(entry.devices)):
        table.add_row(str(instance), str(replica), str(rank), device)
    return table
