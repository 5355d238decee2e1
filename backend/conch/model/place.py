"""Which share of a model a worker has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from conch.api import AttentionKernel, EngineConfig, ModelSpec, Move
from conch.api.experts import NO_EXPERTS, ExpertLoad
from conch.api.mesh import Meeting, Seat
from conch.model.choosing import Model, load_model
from conch.model.describe import Description
from conch.model.mesh.balance import agree_on_layers
from conch.model.mesh.cut import cut_model
from conch.model.mesh.group import MeshGroup
from conch.model.mesh.handover import StageClock
from conch.model.mesh.likeness import check_alike
from conch.model.mesh.split import share_of
from conch.model.mesh.staged import StagedModel, load_share
from conch.model.mesh.traffic import Traffic

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

    def follow(self, moves: Sequence[Move]) -> None:
        """Hear which blocks were moved before the next step."""

    def warmed_up(self) -> None:
        """Hear that all steps from here are of requests."""

    def expert_load(self) -> ExpertLoad:
        """Return what the experts of the model had to do."""

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

    def follow(self, moves: Sequence[Move]) -> None:
        """Do nothing: whatever is moved is here."""

    def warmed_up(self) -> None:
        """Do nothing."""

    def expert_load(self) -> ExpertLoad:
        """Return nothing: they are counted where ranks share them."""
        return NO_EXPERTS

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
    meeting
        Where it finds the others.

    Raises
    ------
    ConfigError
        The model cannot be divided like this.
    CheckpointError
        It is not that of rank 0.
    """

    def __init__(self, description: Description, config: EngineConfig, seat: Seat, meeting: Meeting) -> None:
        check_alike(description.folder, seat, meeting)
        self._description, self._config = description, config
        self._model: StagedModel | None = None
        self._group = MeshGroup(seat, meeting)
        layers = agree_on_layers(description, config.pipeline_layers, self._group)
        self._share = cut_model(description, seat, layers, config)
        self.spec = share_of(description.spec, self._share.heads, self._share.layers)

    @property
    def clock(self) -> StageClock:
        """Of its stage."""
        return self._group.handover.clock

    def load(self, kernel: AttentionKernel, progress: Progress) -> StagedModel:
        """Load the share in transformers' own modules."""
        self._model = load_share(self._share, self._description, self._group, self._config, progress)
        return self._model

    def least(self, name: str, number: int) -> int:
        """Ask all ranks."""
        return self._group.least(name, number)

    @property
    def traffic(self) -> Traffic:
        """What this rank has put into collectives so far."""
        return self._group.traffic

    def follow(self, moves: Sequence[Move]) -> None:
        """Hear which blocks were moved before the next step."""
        if self._model is not None:
            self._model.follow(moves)

    def warmed_up(self) -> None:
        """Forget what warming up has counted."""
        if self._model is not None:
            self._model.warmed_up()

    def expert_load(self) -> ExpertLoad:
        """Return what the experts had to do."""
        return NO_EXPERTS if self._model is None else self._model.expert_load()

    def close(self) -> None:
        """Leave them."""
        if self._model is not None:
            self._model.close()
        self._group.close()
