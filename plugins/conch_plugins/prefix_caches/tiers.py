"""Where blocks go that are evicted from the KV pool: slots in the memory of the host, then on its disk."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from conch.api import Arena, Move, PrefixCacheStats
from conch_plugins.prefix_caches.event_log import EventLog


class Stored(Protocol):
    """What a tier stores: the entry of a cache."""

    block: int | None


E = TypeVar("E", bound=Stored)


class Tier(Generic[E]):
    """The slots of one arena, and which entry lies in which.

    Writes to a disk can fail: what was written there is neither found nor displaced before it is known to
    have arrived.

    Parameters
    ----------
    arena, slots
        What belongs to this tier.
    log
        Told of what is stored and removed.
    """

    def __init__(self, arena: Arena, slots: range, log: EventLog) -> None:
        self.arena = arena
        self.num_loads = 0
        self._log = log
        self._free = list(reversed(slots))
        self._slots: OrderedDict[E, int] = OrderedDict()
        self._on_the_way: dict[int, list[E]] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, entry: E) -> bool:
        return entry in self._slots

    def has(self, entry: E) -> bool:
        """Whether the entry can be read from here."""
        slot = self._slots.get(entry)
        return slot is not None and slot not in self._on_the_way

    def touch(self, entry: E) -> bool:
        """Whether the entry lies here; if so, all others go before it."""
        if entry not in self._slots:
            return False
        self._slots.move_to_end(entry)
        return True

    def in_the_way(self) -> tuple[E, int] | None:
        """Return the entry that must go before another can come, and its slot; None where there is room.

        None, too, where nothing can go now: there is no room then.
        """
        if self._free or not self._slots:
            return None
        entry, slot = next(iter(self._slots.items()))
        return None if slot in self._on_the_way else (entry, slot)

    def write(self, entry: E, source: int, source_arena: Arena) -> Move | None:
        """Put an entry into a free slot, if there is one."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._slots[entry] = slot
        if self.arena is Arena.DISK:
            self._on_the_way.setdefault(slot, []).append(entry)
        self._log.stored(entry, self.arena)
        return Move(source, slot, source_arena, self.arena)

    def read(self, entry: E, block: int) -> Move:
        """Bring an entry to a block of the KV pool; its copy stays: its next eviction will cost nothing."""
        self._slots.move_to_end(entry)
        self.num_loads += 1
        return Move(self._slots[entry], block, self.arena, Arena.DEVICE)

    def drop(self, entry: E) -> None:
        """Forget an entry, if it lies here."""
        slot = self._slots.pop(entry, None)
        if slot is not None:
            self._free.append(slot)
            self._log.removed(entry, self.arena)

    def settle(self, slot: int, has_failed: bool) -> E | None:
        """Note how the oldest write to a slot ended; returns the entry that is lost, if it has failed."""
        writes = self._on_the_way.get(slot)
        if not writes:
            return None
        entry = writes.pop(0)
        if not writes:
            del self._on_the_way[slot]
        if not has_failed or self._slots.get(entry) != slot:
            return None
        self.drop(entry)
        return entry


class Tiers(Generic[E]):
    """Lower tiers, each taking what the one above gives up. With none, what is evicted is gone.

    Its moves are to be made in the order in which they were noted, those of others between them.

    Parameters
    ----------
    slots
        The slots of each arena, the nearest arena first.
    block_size
        Tokens in a block.
    log
        Told of what is stored and removed.
    lost
        Called for an entry that lies nowhere any more.
    """

    def __init__(
        self, slots: Mapping[Arena, range], block_size: int, log: EventLog, lost: Callable[[E], None]
    ) -> None:
        self._tiers: dict[Arena, Tier[E]] = {arena: Tier(arena, own, log) for arena, own in slots.items()}
        self._levels = tuple(self._tiers.values())
        self._block_size = block_size
        self._lost = lost
        self._moves: list[Move] = []

    def __contains__(self, entry: E) -> bool:
        return any(entry in tier for tier in self._levels)

    def has(self, entry: E) -> bool:
        """Whether the entry can be brought back."""
        return any(tier.has(entry) for tier in self._levels)

    def put(self, entry: E, block: int) -> None:
        """Take an entry that leaves its block of the KV pool."""
        self._put(0, entry, block, Arena.DEVICE)

    def bring(self, entry: E, block: int) -> bool:
        """Bring an entry back to a block of the KV pool; False where no tier has it."""
        tier = next((tier for tier in self._levels if tier.has(entry)), None)
        if tier is None:
            return False
        self._moves.append(tier.read(entry, block))
        return True

    def drop(self, entry: E) -> None:
        """Forget an entry everywhere."""
        for tier in self._levels:
            tier.drop(entry)

    def take_moves(self) -> tuple[Move, ...]:
        """Hand out the moves since the last call."""
        moves = tuple(self._moves)
        self._moves.clear()
        return moves

    def settle(self, moves: Sequence[Move], failed: Sequence[int]) -> None:
        """Note that moves were made, but for those at the indices in `failed`."""
        for index, move in enumerate(moves):
            tier = self._tiers.get(move.target_arena)
            entry = None if tier is None else tier.settle(move.target, index in failed)
            if entry is not None:
                self._check(entry)

    def stats(self) -> PrefixCacheStats:
        """Return how much lies in each tier, and how much came back from it."""
        held, loads = {Arena.HOST: 0, Arena.DISK: 0}, {Arena.HOST: 0, Arena.DISK: 0}
        for tier in self._levels:
            held[tier.arena] = len(tier)
            loads[tier.arena] = tier.num_loads * self._block_size
        return PrefixCacheStats(
            host_blocks=held[Arena.HOST],
            disk_blocks=held[Arena.DISK],
            host_hits=loads[Arena.HOST],
            disk_hits=loads[Arena.DISK],
        )

    def _put(self, level: int, entry: E, source: int, source_arena: Arena) -> None:
        if level == len(self._levels):
            return
        tier = self._levels[level]
        if tier.touch(entry):
            return
        displaced = tier.in_the_way()
        if displaced is not None:
            tier.drop(displaced[0])
        move = tier.write(entry, source, source_arena)
        if displaced is not None:
            other, slot = displaced
            if other.block is None:
                self._put(level + 1, other, slot, tier.arena)  # it is read before the slot is written
            self._check(other)
        if move is not None:
            self._moves.append(move)

    def _check(self, entry: E) -> None:
        if entry.block is None and entry not in self:
            self._lost(entry)
