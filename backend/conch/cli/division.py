"""How a model is divided: options that say so, and what each rank then holds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table

from conch.api.config import EngineConfig
from conch.api.model_reference import DEMO_SCHEME, resolve_model_reference
from conch.engine.environment import settle_environment

if TYPE_CHECKING:
    from conch.model.mesh.holding import Holding

_SIZES = {
    "tensor_parallel_size": "ranks that share each layer",
    "pipeline_parallel_size": "stages that share the layers",
    "expert_parallel_size": "parts that share experts and rows, of as many ranks each as share a layer",
    "data_parallel_size": "replicas in an instance, each with weights of its own",
}
_DEMO, _DEMO_WITH_EXPERTS = DEMO_SCHEME + "llama", DEMO_SCHEME + "mixtral"


def add_division_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each size, and ``--demo``."""
    parser.add_argument(
        "--demo",
        action="store_true",
        help=f"a small model with random weights that many ranks can divide: {_DEMO}, or, where experts are "
        f"divided, {_DEMO_WITH_EXPERTS}",
    )
    for key, meaning in _SIZES.items():
        flag = f"--{key.replace('_', '-')}"
        parser.add_argument(flag, type=int, metavar="N", help=f"{meaning} (default: 1)")


def division_from(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sizes that were given, as keys of `model.json`."""
    return {key: size for key in _SIZES if (size := getattr(options, key)) is not None}


def model_from(options: argparse.Namespace) -> str | None:
    """Return what ``--model`` says, or else ``--demo``."""
    model: str | None = options.model
    if not options.demo or model is not None:
        return model
    return _DEMO_WITH_EXPERTS if (options.expert_parallel_size or 1) > 1 else _DEMO


def rank_holdings(config: EngineConfig) -> tuple[str, Sequence[Holding]]:
    """Return the model's name and what each rank of an engine holds. Needs no weights.

    Raises
    ------
    ConchError
        The model cannot be served, or not be divided like this; the message is that of an engine.
    """
    settle_environment()  # before anything imports torch
    from conch.model.checkpoint import resolve_checkpoint
    from conch.model.describe import describe
    from conch.model.mesh.holding import holdings

    folder = Path(resolve_model_reference(config.model)).expanduser()
    if not (folder / "config.json").is_file():
        folder = resolve_checkpoint(config, _ignore)
    # Ranks run on CPUs so far, but what they hold is the same anywhere.
    description = describe(folder, msgspec.structs.replace(config, device="cpu"))
    return description.spec.name, holdings(description, config)


def table_of_ranks(found: Sequence[Holding]) -> Table:
    """Return a table with a row for each rank."""
    table = Table(box=None, pad_edge=False)
    for column in ("rank", "stage", "layers", "query heads", "KV heads", "experts", "weights", "KV a token"):
        table.add_column(column, justify="right")
    for one in found:
        table.add_row(
            str(one.seat.rank),
            str(one.seat.stage),
            *(_range(held) for held in (one.layers, one.heads.query, one.heads.kv, one.experts)),
            human_bytes(one.weight_bytes),
            human_bytes(one.kv_bytes),
        )
    return table


def note_on_stages(config: EngineConfig) -> str:
    """Return what has to be said of the layers of stages; empty where nothing has."""
    if config.pipeline_parallel_size == 1 or config.pipeline_layers is not None:
        return ""
    return "Layers are divided by their weights here; an engine measures them, unless pipeline_layers says."


def human_bytes(number: float) -> str:
    """Return bytes with three digits and a unit."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return f"{number:.3g} B"


def _range(held: tuple[int, int]) -> str:
    """Return first and last, both held."""
    first, end = held
    if first == end:
        return "-"
    return str(first) if end - first == 1 else f"{first}-{end - 1}"


def _ignore(stage: str, fraction: float) -> None:
    """Hear of progress that nobody waits for."""
