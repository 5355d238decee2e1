"""Which share of a model a worker has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from conch.api import AttentionKernel, EngineConfig, ModelSpec
from conch.api.mesh import Seat
from conch.model.choosing import Model, load_model
from conch.model.describe import Description
from conch.model.mesh.balance import agree_on_layers
from conch.model.mesh.cut import cut_model
from conch.model.mesh.group import MeshGroup
from conch.model.mesh.handover import StageClock
from conch.model.mesh.split import share_of
from conch.model.mesh.staged import StagedModel, load_share

Progress = Callable[[str, float], None]


class Place(Protocol):
    """A worker's share of the model, and the ranks that have the others."""

    @property
    def spec(self) -> ModelSpec:
        """The share, as its attention kernel and KV pool see it."""

    def load(self, kernel: AttentionKernel, progress: Progress) -> Model:
        """Load it."""

    def least(self, name: str, number: int) -> int:
        """Return the least of what all ranks say under a name, which is used once."""

    def close(self) -> None:
        """Leave the other ranks."""


class Whole:
    """All of the model, and nobody else."""

    def __init__(self, description: Description, config: EngineConfig) -> None:
        self._description, self._config = description, config

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self._description.spec

    def load(self, kernel: AttentionKernel, progress: Progress) -> Model:
        """Load it in the make that suits it."""
        return load_model(self._description, self._config, kernel, progress)

    def least(self, name: str, number: int) -> int:
        """Return the number."""
        return number

    def close(self) -> None:
        """Leave nobody."""


class InMesh:
    """The share of a rank.

    Parameters
    ----------
    description
        The whole model.
    config
        The engine's configuration.
    seat
        Which rank.

    Raises
    ------
    ConfigError
        The model cannot be divided like this.
    """

    def __init__(self, description: Description, config: EngineConfig, seat: Seat) -> None:
        self._description, self._config = description, config
        self._group = MeshGroup(seat)
        layers = agree_on_layers(description, config.pipeline_layers, self._group)
        self._share = cut_model(description, seat, layers, config.trust_remote_code)
        self.spec = share_of(description.spec, self._share.heads, self._share.layers)

    @property
    def clock(self) -> StageClock:
        """Of its stage."""
        return self._group.handover.clock

    def load(self, kernel: AttentionKernel, progress: Progress) -> StagedModel:
        """Load the share in transformers' own modules."""
        most_tokens = self._config.max_num_batched_tokens
        return load_share(self._share, self._description, self._group, most_tokens, progress)

    def least(self, name: str, number: int) -> int:
        """Ask all ranks."""
        return self._group.least(name, number)

    def close(self) -> None:
        """Leave them."""
        self._group.close()
