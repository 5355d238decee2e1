"""The event log that others read: what is stored and removed, in vLLM's format."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import msgspec

from conch.api import Arena
from conch_plugins.prefix_caches.trail import Trail

HASH_BYTES = 8
MEDIUM = {Arena.DEVICE: "GPU", Arena.HOST: "CPU", Arena.DISK: "DISK"}
"""vLLM's names of where a block lies; the KV pool is called GPU on a CPU, too."""


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """Blocks that lie in a medium now, each the parent of the next."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    """Blocks that lie in a medium no longer."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    """Nothing is cached any more, anywhere."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True):
    """What happened in one step.

    Attributes
    ----------
    ts
        Seconds since the epoch.
    """

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int = 0


class Publisher(Protocol):
    """Sends batches without ever blocking the caller."""

    def publish(self, batch: KVEventBatch) -> None:
        """Send a batch, or lose it."""

    def close(self) -> None:
        """Send what is left, within bounded time, and send no more."""


@dataclass(slots=True)
class _Named:
    """An entry as others know it, and in how many places it lies."""

    block_hash: int
    parent_hash: int | None
    token_ids: list[int]
    num_places: int = 0


class KVEventLog:
    """Gathers events and publishes those of each step together.

    Begins and ends by saying that nothing is cached, so that nobody believes what an earlier engine told.

    Parameters
    ----------
    block_size
        Tokens in a block.
    publisher
        Takes the batches.
    """

    def __init__(self, block_size: int, publisher: Publisher) -> None:
        self._block_size = block_size
        self._publisher = publisher
        self._named: dict[object, _Named] = {}
        self._events: list[KVEvent] = [AllBlocksCleared()]
        self.publish()

    def name(self, entry: object, trail: Trail, index: int) -> None:
        """Learn hash, parent and tokens of an entry that is about to be stored."""
        if entry not in self._named:
            digests = trail.digests(index + 1)
            parent = _number(digests[index - 1]) if index else None
            self._named[entry] = _Named(_number(digests[index]), parent, trail.block_tokens(index))

    def stored(self, entry: object, arena: Arena) -> None:
        """Note that an entry lies in an arena now; blocks that follow each other make one event."""
        named, medium = self._named[entry], MEDIUM[arena]
        named.num_places += 1
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlockStored)
            and last.medium == medium
            and last.block_hashes[-1] == named.parent_hash
        ):
            last.block_hashes.append(named.block_hash)
            last.token_ids += named.token_ids
            return
        self._events.append(
            BlockStored(
                [named.block_hash],
                named.parent_hash,
                list(named.token_ids),
                self._block_size,
                None,
                medium,
            )
        )

    def removed(self, entry: object, arena: Arena) -> None:
        """Note that an entry lies in an arena no longer."""
        named, medium = self._named[entry], MEDIUM[arena]
        named.num_places -= 1
        if named.num_places == 0:
            del self._named[entry]
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes.append(named.block_hash)
        else:
            self._events.append(BlockRemoved([named.block_hash], medium))

    def publish(self) -> None:
        """Send what was noted since the last call."""
        if self._events:
            self._publisher.publish(KVEventBatch(time.time(), self._events))
            self._events = []

    def close(self) -> None:
        """Say that nothing is cached any more, and send no more."""
        self._events.append(AllBlocksCleared())
        self.publish()
        self._publisher.close()


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:HASH_BYTES], "big")
