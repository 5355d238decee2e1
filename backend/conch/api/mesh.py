"""Ranks that compute every step together: how many, which does what, and what they tell each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from conch.api.errors import ConchError
from conch.api.seams import Worker
from conch.api.steps import Arena, StepPlan


class MeshError(ConchError):
    """A rank is missing, has failed or has died: the ranks that are left cannot go on without it."""


class MeshShape(msgspec.Struct, frozen=True):
    """How a model is divided.

    Attributes
    ----------
    tensor
        Ranks that share every layer.
    pipeline
        Stages, each of which holds some of the layers.
    expert
        Groups of `tensor` ranks in each stage, among which the experts of every layer are divided, and the
        rows of every step.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.stage_size * self.pipeline

    @property
    def stage_size(self) -> int:
        """Ranks of one stage."""
        return self.tensor * self.expert


class Seat(msgspec.Struct, frozen=True):
    """The place of one rank.

    The ranks of the last stage come first, so that rank 0, which is the engine's own process, has the logits
    and samples from them without a way back through the stages.

    Attributes
    ----------
    rank
        In ``[0, shape.size)``.
    shape
        The whole mesh.
    timeout_s
        How long a rank waits for another one.
    """

    rank: int
    shape: MeshShape
    timeout_s: float

    @property
    def stage(self) -> int:
        """Which stage: 0 has the embedding, the last one the head."""
        return self.shape.pipeline - 1 - self.rank // self.shape.stage_size

    @property
    def part(self) -> int:
        """Which part of each of its layers."""
        return self.rank % self.shape.tensor

    @property
    def expert_part(self) -> int:
        """Which part of the experts, and of the rows."""
        return self.rank // self.shape.tensor % self.shape.expert

    @property
    def is_first_stage(self) -> bool:
        """Whether it begins with token ids."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it ends with logits."""
        return self.stage == self.shape.pipeline - 1


class RankOrder(msgspec.Struct, frozen=True, array_like=True, tag="order"):
    """What rank 0 tells all others: the next step, and what has been sampled since the order before.

    Attributes
    ----------
    learned
        Requests with the tokens that were added to them.
    """

    plan: StepPlan
    learned: tuple[tuple[int, tuple[int, ...]], ...] = ()


class RankJoined(msgspec.Struct, frozen=True, array_like=True, tag="joined"):
    """A rank is there, and begins to load."""


class RankReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """A rank takes orders.

    Attributes
    ----------
    num_blocks
        KV blocks in its pool.
    num_slots
        Blocks of each arena, by its number.
    """

    num_blocks: int
    num_slots: tuple[int, ...]

    @classmethod
    def of_sizes(cls, num_blocks: int, num_slots: Callable[[Arena], int]) -> RankReady:
        """Ask for the size of each arena."""
        return cls(num_blocks, tuple(num_slots(arena) for arena in Arena))


RankNews = RankJoined | RankReady
"""What a rank says."""


class Meeting(Protocol):
    """Where the ranks find one another: notes that all of them can read."""

    @property
    def address(self) -> str:
        """Of this host, where the other ranks reach it."""

    def post(self, key: str, value: bytes) -> None:
        """Tell all ranks a value under a name that is used once."""

    def read(self, key: str, timeout_s: float) -> bytes:
        """Return what some rank says under a name, waiting for it. Raises MeshError where nobody does."""


class RankLink(Protocol):
    """Rank 0's connection to another rank."""

    @property
    def whence(self) -> str:
        """Where the rank comes from, for people to read."""

    def send(self, order: RankOrder) -> None:
        """Give an order. Raises OSError when the rank is gone."""

    def receive(self, timeout_s: float | None) -> RankNews | None:
        """Return what it says next; None where the time (None: for ever) has passed.

        Raises MeshError, which says why, when the rank is gone.
        """

    def end(self, timeout_s: float) -> None:
        """Let the rank end, by force after `timeout_s`. Safe to repeat."""


class Ranks(Protocol):
    """Makes the ranks of a mesh; for parallelism plugins."""

    def start(self, seat: Seat) -> RankLink:
        """Have another process take a seat, one started here or one that comes. Does not wait for it."""

    def worker(self, seat: Seat) -> Worker:
        """Build the worker of this process, together with all other ranks."""

    def find_loss(self) -> str | None:
        """Say which rank is lost and why, after a moment in which it can be noticed; None where none is."""
