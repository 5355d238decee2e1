"""All that is known of a model before its weights are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conch.api import EngineConfig, ModelSpec
from conch.model.checkpoint import resolve_checkpoint
from conch.model.describe import Description, describe

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checkpoint found, converted where needed, and understood.

    Attributes
    ----------
    config
        What the engine was told.
    description
        What the model room needs to load it.
    """

    config: EngineConfig
    description: Description

    @property
    def spec(self) -> ModelSpec:
        """The model, as plugins may know it."""
        return self.description.spec

    @property
    def folder(self) -> Path:
        """The checkpoint in Hugging Face layout, with a tokenizer.json."""
        return self.description.folder


def prepare(config: EngineConfig, progress: Progress) -> Prepared:
    """Find the checkpoint and understand it. Reads no weights, unless a GGUF file has to be converted.

    Raises
    ------
    CheckpointError
        It is missing, or cannot be served.
    ConfigError
        The configuration asks for what the model does not have.
    """
    folder = resolve_checkpoint(config, progress)
    return Prepared(config, describe(folder, config))
