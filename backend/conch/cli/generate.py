"""``conch generate``: the same engine in this process, streaming to the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from conch.api.config import EngineConfig, parse_assignment, parse_config, resolve_model_reference
from conch.api.errors import CheckpointError, ConfigError
from conch.api.sampling import SamplingParams
from conch.api.steps import Usage
from conch.cli.common import add_model_options, model_reference, settings_from

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

    from conch.engine.local import LocalEngine

    console = Console(stderr=True)
    with _load_bar(console) as bar:
        stages = _Stages(bar)
        engine = LocalEngine(config, stages.show)
    with engine:
        usage = _stream(engine, _prompt_ids(engine.info.model_folder, options), params)
    _report(console, usage)
    return 0


def sampling_from(options: argparse.Namespace) -> SamplingParams:
    """Return the sampling options, validated.

    Raises
    ------
    ConfigError
        An unknown key or a value of the wrong type.
    RequestError
        A value out of range.
    """
    wanted: dict[str, Any] = {"max_tokens": _DEFAULT_MAX_TOKENS}
    wanted.update(parse_assignment(text) for text in options.sampling)
    for key in ("max_tokens", *_SHORTHANDS):
        value = getattr(options, key)
        if value is not None:
            wanted.update([parse_assignment(f"{key}={value}")])
    known = {field.name for field in msgspec.structs.fields(SamplingParams)}
    if unknown := wanted.keys() - known:
        raise ConfigError(f"unknown sampling key {min(unknown)!r}; known keys: {', '.join(sorted(known))}")
    if wanted.get("n", 1) != 1:
        raise ConfigError("the terminal shows one answer: n must be 1")
    if isinstance(wanted.get("stop"), str):
        wanted["stop"] = [wanted["stop"]]
    try:
        return msgspec.convert(wanted, SamplingParams)
    except msgspec.ValidationError as error:
        raise ConfigError(f"sampling parameters: {error}") from error


def _config(options: argparse.Namespace) -> EngineConfig:
    config = parse_config({"model": model_reference(options.model), **settings_from(options)})
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


def _prompt_ids(folder: str, options: argparse.Namespace) -> list[int]:
    if not (options.chat or options.system):
        from tokenizers import Tokenizer

        ids: list[int] = Tokenizer.from_file(str(Path(folder, "tokenizer.json"))).encode(options.prompt).ids
        return ids
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None:
        raise CheckpointError(f"{folder} has no chat template; leave out --chat")
    messages = [{"role": "system", "content": options.system}] if options.system else []
    messages.append({"role": "user", "content": options.prompt})
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def _stream(engine: LocalEngine, token_ids: list[int], params: SamplingParams) -> Usage | None:
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    tokenizer = Tokenizer.from_file(str(Path(engine.info.model_folder, "tokenizer.json")))
    decoder = DecodeStream(ids=token_ids, skip_special_tokens=params.skip_special_tokens)
    text = StopText(params.stop)
    usage = None
    for output in engine.stream(token_ids, params):
        pieces = (decoder.step(tokenizer, token_id) for token_id in output.token_ids)
        print(text.feed("".join(filter(None, pieces))), end="", flush=True)
        usage = output.usage or usage
        if text.is_over:
            break
    print(text.rest(), flush=True)
    return usage


class StopText:
    """Cuts text before the first stop string, holding back what may become one.

    Parameters
    ----------
    stops
        The stop strings; none lets everything through at once.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self._longest = max(map(len, stops), default=1)
        self.is_over = False

    def feed(self, text: str) -> str:
        """Add text and return what can be shown."""
        held = self._held + text
        found = [at for at in (held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.is_over = True
            self._held = ""
            return held[: min(found)]
        keep = self._longest - 1
        shown = held[: len(held) - keep]
        self._held = held[len(shown) :]
        return shown

    def rest(self) -> str:
        """Return what was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held


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
