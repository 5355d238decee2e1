"""``conch generate``: the same engine in this process, streaming to the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from conch.api.config import EngineConfig, parse_config
from conch.api.errors import ConfigError
from conch.api.model_reference import resolve_model_reference
from conch.api.sampling import SamplingParams
from conch.api.steps import Usage
from conch.cli.common import add_model_options, model_reference, parse_assignment, settings_from
from conch.engine.environment import settle_environment
from conch.host.chat_template import load_chat_template
from conch.host.choice import ChoiceFactory
from conch.host.codec import TextCodec
from conch.host.sampling_input import parse_sampling

if TYPE_CHECKING:
    from conch.engine.local import LocalEngine

_SHORTHANDS = ("temperature", "top_p", "top_k", "seed")
_DEFAULT_MAX_TOKENS = 256


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "generate", help="generate text in this process, without Triton", allow_abbrev=False
    )
    add_model_options(parser)
    parser.add_argument("prompt", metavar="PROMPT")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message in front of it; implies --chat")
    parser.add_argument("--max-tokens", metavar="N", help=f"(default: {_DEFAULT_MAX_TOKENS})")
    for key in _SHORTHANDS:
        parser.add_argument(f"--{key.replace('_', '-')}", metavar="X")
    parser.add_argument(
        "--sampling",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other key of a request's sampling_parameters; may be repeated",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Load, generate, print."""
    params = sampling_from(options)
    config = _config(options)

    settle_environment()  # before anything imports torch
    from conch.engine.local import LocalEngine

    console = Console(stderr=True)
    with _load_bar(console) as bar:
        stages = _Stages(bar)
        engine = LocalEngine(config, stages.show)
    with engine:
        folder = Path(engine.info.model_folder)
        codec = TextCodec.load(folder)
        usage = _stream(engine, codec, _prompt_ids(folder, codec, options), params)
    _report(console, usage)
    return 0


def sampling_from(options: argparse.Namespace) -> SamplingParams:
    """Return the sampling options, read as the server reads a request's.

    Raises
    ------
    RequestError
        An unknown key, or a value of the wrong type or out of range.
    """
    wanted: dict[str, Any] = {"max_tokens": _DEFAULT_MAX_TOKENS}
    wanted.update(parse_assignment(text) for text in options.sampling)
    for key in ("max_tokens", *_SHORTHANDS):
        value = getattr(options, key)
        if value is not None:
            wanted[key] = value
    params = parse_sampling(wanted)
    if params.n != 1:
        raise ConfigError("the terminal shows one answer: n must be 1")
    return params


def _config(options: argparse.Namespace) -> EngineConfig:
    config = parse_config({"model": model_reference(options.model), **settings_from(options)})
    if config.data_parallel_size > 1:
        raise ConfigError("one prompt needs one engine: data_parallel_size must be 1")
    return msgspec.structs.replace(config, model=resolve_model_reference(config.model))


class _Stages:
    """Shows each stage of loading as one line of a progress bar."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._tasks: dict[str, TaskID] = {}

    def show(self, stage: str, fraction: float) -> None:
        """Move the stage's line."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=1.0)
        self._bar.update(self._tasks[stage], completed=fraction)


def _load_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True
    )


def _prompt_ids(folder: Path, codec: TextCodec, options: argparse.Namespace) -> list[int]:
    if not (options.chat or options.system):
        return codec.encode(options.prompt, add_special_tokens=True)
    messages = [{"role": "system", "content": options.system}] if options.system else []
    messages.append({"role": "user", "content": options.prompt})
    return codec.encode(load_chat_template(folder).render(messages), add_special_tokens=False)


def _stream(
    engine: LocalEngine, codec: TextCodec, token_ids: list[int], params: SamplingParams
) -> Usage | None:
    choice = ChoiceFactory(params, codec).make()
    for output in engine.stream(token_ids, params):
        choice.take(output)
        print("".join(choice.text), end="", flush=True)
        choice.clear()
        if choice.finish_reason is not None:
            break
    print(flush=True)
    return choice.usage


def _report(console: Console, usage: Usage | None) -> None:
    if usage is None or usage.ttft_s is None:
        return
    decode_s = usage.total_s - usage.ttft_s
    rate = (
        f", then {(usage.num_output - 1) / decode_s:.1f} tokens/s"
        if usage.num_output > 1 and decode_s > 0
        else ""
    )
    console.print(
        f"{usage.num_prompt} prompt tokens, {usage.num_output} generated; "
        f"first after {1000 * usage.ttft_s:.0f} ms{rate}",
        style="dim",
        highlight=False,
    )
