"""Swap: the KV of requests that were preempted, parked in the host's memory until they run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from conch.api.config import EngineConfig
from conch.api.prefix_caching import Match
from conch.api.steps import NO_BLOCK, Arena, Move

COMPUTED_PER_MOVED = 0.1
"""What it costs to move a token's KV out and back, where to compute a token costs 1."""


class Parking(Protocol):
    """Keeps KV of requests that do not run. Not a seam: it works under every KV manager.

    A plan builder asks it to `park` what a victim leaves and to `fetch` it at its next admission, and the
    engine to `drop` what nobody will come for. The blocks themselves go where `Move` says, with the plan.
    """

    @property
    def num_slots(self) -> int:
        """Blocks that fit."""

    @property
    def num_used(self) -> int:
        """Blocks parked."""

    def num_tokens(self, request_id: int) -> int:
        """Leading tokens of a request whose KV is parked; 0 where nothing is."""

    def cost(self, num_blocks: int, num_lost: int) -> float:
        """Price a preemption in tokens computed: those of `num_lost`, or what moving the blocks comes to."""

    def park(
        self, request_id: int, table: Sequence[int], num_tokens: int, num_lost: int
    ) -> tuple[Move, ...] | None:
        """Take over the KV of the first `num_tokens` tokens; None to leave it to be computed again.

        Parameters
        ----------
        table
            The request's blocks; those that were given up stay so.
        num_lost
            Tokens that would have to be computed again if the KV were not parked.
        """

    def table_start(self, request_id: int, match: Match) -> Match:
        """Return what a request's new table begins with, given what the prefix cache has of it."""

    def fetch(self, request_id: int, table: Sequence[int], num_held: int) -> tuple[Move, ...]:
        """Bring back what is parked into the request's new table, of whose tokens `num_held` are in place."""

    def drop(self, request_id: int) -> None:
        """Forget what is parked of a request; unknown ids are ignored."""


class NoParking:
    """No host pool: whoever is preempted computes its KV again."""

    num_slots = 0
    num_used = 0

    def num_tokens(self, request_id: int) -> int:
        """Have nothing."""
        return 0

    def cost(self, num_blocks: int, num_lost: int) -> float:
        """Price what is computed again: all that is lost."""
        return num_lost

    def park(
        self, request_id: int, table: Sequence[int], num_tokens: int, num_lost: int
    ) -> tuple[Move, ...] | None:
        """Decline."""
        return None

    def table_start(self, request_id: int, match: Match) -> Match:
        """Leave it as it is."""
        return match

    def fetch(self, request_id: int, table: Sequence[int], num_held: int) -> tuple[Move, ...]:
        """Have nothing to bring."""
        return ()

    def drop(self, request_id: int) -> None:
        """Have nothing to forget."""


@dataclass(frozen=True, slots=True)
class _Parked:
    """A request's KV: the blocks of its table from index `first` on."""

    num_tokens: int
    first: int
    slots: tuple[int, ...]


class HostParking:
    """Slots in the arena `SWAP`, handed out to whoever is preempted.

    A slot is free again as soon as its move back is planned: moves are made in order.

    Parameters
    ----------
    num_slots
        Blocks in the host pool.
    block_size
        Tokens in a block.
    is_thrifty
        Whether to decline where computing again is the cheaper way.
    """

    def __init__(self, num_slots: int, block_size: int, is_thrifty: bool = False) -> None:
        self._num_slots = num_slots
        self._block_size = block_size
        self._is_thrifty = is_thrifty
        self._free = list(range(num_slots - 1, -1, -1))
        self._parked: dict[int, _Parked] = {}

    @property
    def num_slots(self) -> int:
        """Blocks that fit."""
        return self._num_slots

    @property
    def num_used(self) -> int:
        """Blocks parked."""
        return self._num_slots - len(self._free)

    def num_tokens(self, request_id: int) -> int:
        """Leading tokens of a request whose KV is parked."""
        parked = self._parked.get(request_id)
        return 0 if parked is None else parked.num_tokens

    def cost(self, num_blocks: int, num_lost: int) -> float:
        """Price the moves, and where there is no room, or thrift finds it cheaper, what is computed again."""
        if num_blocks > len(self._free):
            return num_lost
        moved = COMPUTED_PER_MOVED * num_blocks * self._block_size
        return min(moved, num_lost) if self._is_thrifty else moved

    def park(
        self, request_id: int, table: Sequence[int], num_tokens: int, num_lost: int
    ) -> tuple[Move, ...] | None:
        """Take over a request's KV while there is room for all of it."""
        kept = table[: -(-num_tokens // self._block_size)]
        first = next((index for index, block in enumerate(kept) if block != NO_BLOCK), len(kept))
        blocks = kept[first:]
        if not blocks or len(blocks) > len(self._free):
            return None
        if self._is_thrifty and self.cost(len(blocks), num_lost) >= num_lost:
            return None
        slots = tuple(self._free.pop() for _ in blocks)
        self._parked[request_id] = _Parked(num_tokens, first, slots)
        return tuple(
            Move(block, slot, target_arena=Arena.SWAP) for block, slot in zip(blocks, slots, strict=True)
        )

    def table_start(self, request_id: int, match: Match) -> Match:
        """Begin with what is cached, or with nothing up to where the parked blocks begin."""
        parked = self._parked.get(request_id)
        if parked is None or parked.num_tokens <= match.num_tokens:
            return match
        if parked.first * self._block_size > match.num_tokens:
            return Match((NO_BLOCK,) * parked.first, parked.first * self._block_size)
        return match.whole_blocks(self._block_size)

    def fetch(self, request_id: int, table: Sequence[int], num_held: int) -> tuple[Move, ...]:
        """Bring back the blocks that the table does not share with the prefix cache."""
        parked = self._parked.get(request_id)
        if parked is None:
            return ()
        self.drop(request_id)
        if num_held >= parked.num_tokens:
            return ()
        begin = num_held // self._block_size
        return tuple(
            Move(slot, table[index], source_arena=Arena.SWAP)
            for index, slot in enumerate(parked.slots, start=parked.first)
            if index >= begin
        )

    def drop(self, request_id: int) -> None:
        """Forget what is parked of a request."""
        parked = self._parked.pop(request_id, None)
        if parked is not None:
            self._free.extend(reversed(parked.slots))

    def check_integrity(self) -> None:
        """Raise AssertionError when a slot is lost or has two owners."""
        slots = [*self._free, *(slot for parked in self._parked.values() for slot in parked.slots)]
        assert sorted(slots) == list(range(self._num_slots)), "host slots are lost or owned twice"


def make_parking(config: EngineConfig, num_slots: int) -> Parking:
    """Return what `preemption_mode` asks for, over a host pool of `num_slots` blocks."""
    if config.preemption_mode == "recompute" or num_slots == 0:
        return NoParking()
    return HostParking(num_slots, config.block_size, is_thrifty=config.preemption_mode == "auto")
