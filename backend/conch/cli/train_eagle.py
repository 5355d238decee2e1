"""``conch train-eagle``: a head that drafts for a model, trained from text that the model itself writes."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from conch.api.config import EngineConfig, parse_config
from conch.api.errors import ConfigError
from conch.api.model_reference import resolve_model_reference
from conch.cli.common import add_model_options, model_reference, settings_from
from conch.engine.environment import settle_environment
from conch.host.chat_template import NoChatTemplate, load_chat_template
from conch.host.codec import TextCodec

_MINUTES, _PROMPTS, _MAX_TOKENS, _VOCABULARY = 40.0, 2000, 160, 8192


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "train-eagle", help="train an EAGLE-3 head that drafts for a model", allow_abbrev=False
    )
    add_model_options(parser)
    parser.add_argument(
        "output", metavar="DIR", help="where the head goes; speculative_config.model names it"
    )
    parser.add_argument(
        "--minutes", type=float, default=_MINUTES, metavar="X", help=f"of learning (default: {_MINUTES:g})"
    )
    for name, value, text in (
        ("prompts", _PROMPTS, "questions that the model answers, to learn from"),
        ("max-tokens", _MAX_TOKENS, "of an answer"),
        ("draft-vocabulary", _VOCABULARY, "tokens that the head can draft"),
        ("seed", 1, "of everything that is drawn"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=value, metavar="N", help=f"{text} (default: {value})"
        )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Ask, read, learn, examine."""
    if options.minutes <= 0 or min(options.prompts, options.max_tokens, options.draft_vocabulary) < 1:
        raise ConfigError("--minutes, --prompts, --max-tokens and --draft-vocabulary must be more than 0")
    config = _config(options)

    settle_environment()  # before anything imports torch
    from conch.training.learning import Course
    from conch.training.lesson_plan import LessonPlan, train_head
    from conch.worker import prepare

    console = Console(stderr=True)
    with _bar(console) as bar:
        stages = _Stages(bar)
        folder = prepare(config, stages.show).folder
        plan = LessonPlan(
            Course(minutes=options.minutes, seed=options.seed),
            max_tokens=options.max_tokens,
            draft_vocabulary=options.draft_vocabulary,
        )
        prompts = _prompts(folder, options.prompts, options.seed)
        result = train_head(config, folder, prompts, plan, Path(options.output), stages.show)
    shown = ", ".join(f"{rate:.0%}" for rate in result.hit_rates)
    print(
        f"acceptance length on held-out answers: {result.acceptance_length:.2f} "
        f"(1 and more drafts right: {shown})"
    )
    return 0


def _config(options: argparse.Namespace) -> EngineConfig:
    config = parse_config({"model": model_reference(options.model), **settings_from(options)})
    return msgspec.structs.replace(config, model=resolve_model_reference(config.model))


def _prompts(folder: Path, count: int, seed: int) -> list[list[int]]:
    """Return questions as the model is asked them: in its chat template, where it has one."""
    from conch.training.prompts import make_prompts

    codec, questions = TextCodec.load(folder), make_prompts(count, seed)
    template = load_chat_template(folder)
    if isinstance(template, NoChatTemplate):
        return [codec.encode(question, add_special_tokens=True) for question in questions]
    return [
        codec.encode(template.render([{"role": "user", "content": question}]), add_special_tokens=False)
        for question in questions
    ]


class _Stages:
    """One line of the progress bar, which goes from stage to stage."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._tasks: dict[str, TaskID] = {}

    def show(self, stage: str, fraction: float) -> None:
        """Move the stage's line; what stands in brackets is news, not a name."""
        name = stage.partition(" (")[0]
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(stage, total=1.0)
        self._bar.update(self._tasks[name], completed=fraction, description=stage)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
