"""``conch topology``: what each rank holds, what ranks tell each other, and what that takes elsewhere."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from conch.api.config import EngineConfig, parse_config
from conch.api.errors import ConfigError
from conch.cli.common import add_model_options, model_reference, settings_from
from conch.cli.division import (
    add_division_options,
    division_from,
    human_bytes,
    model_from,
    note_on_stages,
    rank_holdings,
    table_of_ranks,
)
from conch.cli.hardware import ASSUMED, DEVICES, Machine

if TYPE_CHECKING:
    from conch.model.mesh.holding import Holding

_CONTEXT = 2048
_REQUESTS = (1, 32, 256)
_KINDS = {
    "reduced": "all-reduce",
    "gathered": "gather",
    "sent": "send",
    "exchanged": "all-to-all",
    "counted": "all-gather",
}


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "topology",
        help="show how a model is divided, and predict what it takes",
        description="Show what each rank of an engine holds and tells the others, and predict speed on a "
        "machine that is not at hand. Of the model only its config.json is needed.",
        allow_abbrev=False,
    )
    add_model_options(parser)
    add_division_options(parser)
    parser.add_argument(
        "--hardware", metavar="NxNAME", help=f"predict for a machine: 8xH200; known: {', '.join(DEVICES)}"
    )
    parser.add_argument(
        "--context",
        type=int,
        default=_CONTEXT,
        metavar="N",
        help=f"tokens of each request so far (default: {_CONTEXT})",
    )
    parser.add_argument(
        "--requests",
        type=int,
        action="append",
        metavar="N",
        help="requests that decode at once; may be repeated (default: 1, 32 and 256)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Divide, count, predict, print."""
    requests = tuple(options.requests or _REQUESTS)
    if options.context < 1 or min(requests) < 1:
        raise ConfigError("--context and --requests must be 1 or more")
    settings = {"model": model_reference(model_from(options)), **division_from(options)}
    config = parse_config({**settings, **settings_from(options)})
    machine = Machine.parse(options.hardware) if options.hardware else None
    name, found = rank_holdings(config)
    predicted = None if machine is None else predict(machine, config, found, requests, options.context)
    if options.json:
        print(json.dumps(as_json(name, found, predicted), indent=2))
        return 0
    console = Console()
    console.print(f"{name}, {found[0].dtype}", highlight=False)
    console.print(table_of_ranks(found))
    console.print(note_on_stages(config), soft_wrap=True, highlight=False)
    console.print("Collectives, bytes that a rank puts in for each token of a step:", highlight=False)
    console.print(_table_of_traffic(found))
    if machine is not None and predicted is not None:
        said = f"\nPredicted, not measured. {machine.describe(ASSUMED)}. " + _frame_of(predicted)
        console.print(said, highlight=False, soft_wrap=True)
        console.print(_table_of_prediction(predicted))
    return 0


def bytes_per_token(found: Sequence[Holding]) -> list[dict[str, float]]:
    """Return what each rank puts into collectives for a token that has logits, by kind."""
    said = [one.speech.of_step(1, 1) for one in found]
    return [{name: getattr(one, key) for key, name in _KINDS.items()} for one in said]


def predict(
    machine: Machine,
    config: EngineConfig,
    found: Sequence[Holding],
    requests: Sequence[int],
    context: int,
) -> dict[str, Any]:
    """Predict for as many replicas as the configuration has, requests spread evenly over them.

    Raises
    ------
    ConfigError
        The machine has fewer devices than there are ranks, or less memory than they take.
    """
    from conch.cli.prediction import Load, Predictor

    replicas = config.data_parallel_size
    devices = len(found) * replicas
    if devices > machine.count:
        raise ConfigError(f"{machine.name} has {machine.count} devices, and there are {devices} ranks")
    predictor = Predictor(found, machine.device, ASSUMED)
    if not predictor.kv_tokens:
        heaviest = max(one.weight_bytes for one in found)
        raise ConfigError(
            f"a rank's weights take {human_bytes(heaviest)}, which a device of {machine.name} lacks"
        )
    decode = {}
    for count in requests:
        seconds = predictor.decode_s(-(-count // replicas), context)
        decode[count] = {
            "ms_per_token": 1e3 * seconds,
            "tokens_per_s": count / seconds,
            "fits": -(-count // replicas) * context <= predictor.kv_tokens,
        }
    return {
        "hardware": machine.name,
        "context": context,
        "kv_tokens": predictor.kv_tokens * replicas,
        "prompt_s": predictor.step_s(Load(1, context, context)),
        "decode": decode,
    }


def as_json(name: str, found: Sequence[Holding], predicted: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return all that is shown, for programs."""
    ranks = [
        {
            "rank": one.seat.rank,
            "stage": one.seat.stage,
            "part": one.seat.part,
            "layers": one.layers,
            "query_heads": one.heads.query,
            "kv_heads": one.heads.kv,
            "experts": one.experts,
            "weight_bytes": one.weight_bytes,
            "kv_bytes_per_token": one.kv_bytes,
            "bytes_per_token": said,
        }
        for one, said in zip(found, bytes_per_token(found), strict=True)
    ]
    return {"model": name, "dtype": found[0].dtype, "ranks": ranks, "predicted": predicted}


def _table_of_traffic(found: Sequence[Holding]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("rank", *_KINDS.values(), "all"):
        table.add_column(column, justify="right")
    for one, said in zip(found, bytes_per_token(found), strict=True):
        numbers = (*said.values(), sum(said.values()))
        table.add_row(str(one.seat.rank), *(f"{number:,.0f}" for number in numbers))
    return table


def _frame_of(predicted: Mapping[str, Any]) -> str:
    return (
        f"Requests of {predicted['context']:,} tokens so far; a prompt of as many takes "
        f"{predicted['prompt_s'] * 1e3:,.0f} ms; KV of {predicted['kv_tokens']:,} tokens fits."
    )


def _table_of_prediction(predicted: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("requests", "ms a token", "tokens/s", ""):
        table.add_column(column, justify="left" if not column else "right")
    for count, one in predicted["decode"].items():
        excuse = "" if one["fits"] else "more KV than fits"
        table.add_row(str(count), f"{one['ms_per_token']:.1f}", f"{one['tokens_per_s']:,.0f}", excuse)
    return table
