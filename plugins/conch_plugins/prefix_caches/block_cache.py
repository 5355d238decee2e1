"""What all caches of blocks share: which blocks are cached, and which go first when room is needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from conch.api import Arena, Move, PrefixCacheStats
from conch_plugins.prefix_caches.event_log import EventLog
from conch_plugins.prefix_caches.tiers import Tiers
from conch_plugins.prefix_caches.trail import Trail

NOWHERE: Mapping[Arena, range] = {}


@dataclass(slots=True, eq=False)
class Entry:
    """A block of tokens behind one prefix, whose KV is or was cached.

    `block` is where it lies in the KV pool, None where it does not; it may lie in a lower tier, too.
    """

    block: int | None = field(default=None, kw_only=True)


E = TypeVar("E", bound=Entry)


class BlockCache(ABC, Generic[E]):
    """Half a prefix cache: the other half is how entries are found.

    Blocks without a user go in the order in which they lost their last one. A KV manager releases a table
    from its tail, so a prefix outlives what is behind it.

    Parameters
    ----------
    block_size
        Tokens in a block.
    slots
        Slots of lower tiers for what is evicted, the nearest tier first.
    log
        Told of all that is stored and removed.
    """

    def __init__(self, block_size: int, slots: Mapping[Arena, range], log: EventLog) -> None:
        self._block_size = block_size
        self._tiers: Tiers[E] = Tiers(slots, block_size, log, self._lose)
        self._log = log
        self._by_block: dict[int, E] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @abstractmethod
    def _lose(self, entry: E) -> None:
        """Note that an entry lies nowhere any more."""

    @property
    def num_evictable(self) -> int:
        """Cached blocks without a user."""
        return len(self._evictable)

    def holds(self, block: int) -> bool:
        """Whether the block is cached."""
        return block in self._by_block

    def keep(self, block: int) -> bool:
        """Take over a block whose last user left, if it is cached."""
        if block not in self._by_block:
            return False
        self._evictable[block] = None
        return True

    def reuse(self, block: int) -> None:
        """Note that an evictable block has a user again."""
        del self._evictable[block]

    def evict(self, count: int) -> list[int]:
        """Give up blocks, least recently used first; their content goes to the tier below."""
        evicted: list[int] = []
        while self._evictable and len(evicted) < count:
            block, _ = self._evictable.popitem(last=False)
            entry = self._by_block.pop(block)
            entry.block = None
            self._tiers.put(entry, block)
            self._leave(entry)
            evicted.append(block)
        return evicted

    def discard(self, blocks: Sequence[int]) -> None:
        """Forget blocks that are in use, and what lies of them in lower tiers.

        What was cached behind them is found again once they are.
        """
        for block in blocks:
            entry = self._by_block.pop(block, None)
            if entry is not None:
                entry.block = None
                self._tiers.drop(entry)
                self._leave(entry)

    def take_moves(self) -> tuple[Move, ...]:
        """Hand out the moves between tiers since the last call."""
        return self._tiers.take_moves()

    def end_step(self, moves: Sequence[Move], failed: Sequence[int]) -> None:
        """Note that a step was done, and its moves but for the failed ones; publish what happened."""
        self._tiers.settle(moves, failed)
        self._log.publish()

    def stats(self) -> PrefixCacheStats:
        """Return what lies in lower tiers, and what came back from them."""
        return self._tiers.stats()

    def close(self) -> None:
        """Publish no more."""
        self._log.close()

    def _add(self, entry: E, block: int, trail: Trail, index: int) -> bool:
        """Note that a block in use holds what `entry` stands for, block `index` of a trail.

        False, with nothing changed, where there is no such block (it was given up), or where it stands for
        another entry already.
        """
        if block < 0 or block in self._by_block:
            return False
        entry.block = block
        self._by_block[block] = entry
        self._log.name(entry, trail, index)
        self._log.stored(entry, Arena.DEVICE)
        return True

    def _num_below(self, entries: Iterable[E]) -> int:
        """Count the leading entries that do not lie in the pool and can be brought back to it."""
        count = 0
        for entry in entries:
            if entry.block is not None or not self._tiers.has(entry):
                break
            count += 1
        return count

    def _bring(self, entry: E, block: int, trail: Trail, index: int) -> bool:
        """Fill a block in use from a lower tier; False where `entry` is in the pool, or in no tier."""
        if entry.block is not None or not self._tiers.bring(entry, block):
            return False
        return self._add(entry, block, trail, index)

    def _leave(self, entry: E) -> None:
        self._log.removed(entry, Arena.DEVICE)
        if entry not in self._tiers:
            self._lose(entry)
