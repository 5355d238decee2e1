"""The chat template of a checkpoint, rendered as transformers renders it, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from conch.api.errors import CheckpointError, RequestError

FIELD = "messages"


class ChatTemplate(Protocol):
    """Turns messages into the text of a prompt."""

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt, up to where the assistant's answer begins.

        Raises
        ------
        RequestError
            The messages do not fit the template.
        """


class NoChatTemplate:
    """The template of a checkpoint without one."""

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Refuse."""
        raise RequestError("this model has no chat template; send text_input or input_ids", field=FIELD)


class JinjaChatTemplate:
    """A template in the sandbox that transformers uses.

    Parameters
    ----------
    source
        The template.
    special_tokens
        Names that it may use, such as ``bos_token``.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template is not valid: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt of messages; members that are null count as absent."""
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(
                messages=plain, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except Exception as error:  # a template is code of the checkpoint's: it may raise anything
            raise RequestError(f"the chat template refuses them: {error}", field=FIELD) from None


def load_chat_template(folder: Path) -> ChatTemplate:
    """Read the template of a checkpoint: `chat_template.jinja`, or the one in `tokenizer_config.json`."""
    config = _read_json(folder / "tokenizer_config.json")
    source = config.get("chat_template")
    if isinstance(source, list):  # named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    path = folder / "chat_template.jinja"
    if path.is_file():
        source = path.read_text(encoding="utf-8")
    if not isinstance(source, str):
        return NoChatTemplate()
    named = {**_read_json(folder / "special_tokens_map.json"), **config}
    return JinjaChatTemplate(source, _special_tokens(named))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}


class _GenerationBlock(Extension):
    """``{% generation %}``: marks what the assistant says, which matters in training only."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what the block holds."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
