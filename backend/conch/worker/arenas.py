"""The places where KV blocks lie, and the moves between them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch

from conch.api import Arena, EngineConfig, Move
from conch.worker.disk_store import DiskStore
from conch.worker.pool import allocate_in_host

_log = logging.getLogger(__name__)


class BlockStore(Protocol):
    """One arena: slots of a block each, whose parts are the layers."""

    @property
    def num_slots(self) -> int:
        """Blocks that fit."""

    def read(self, slots: Sequence[int]) -> Iterator[torch.Tensor]:
        """For each layer the content of the slots, ``[2, len(slots), ...]``."""

    def write(self, slots: Sequence[int], layers: Iterator[torch.Tensor]) -> None:
        """Fill different slots with what `read` of a store returned."""

    def close(self) -> None:
        """Let go of what is not memory."""


class TensorStore:
    """An arena in memory: for each layer a tensor ``[2, N, ...]``."""

    def __init__(self, pools: Sequence[torch.Tensor]) -> None:
        self._pools = pools

    @property
    def num_slots(self) -> int:
        """Blocks that fit."""
        return self._pools[0].shape[1]

    def read(self, slots: Sequence[int]) -> Iterator[torch.Tensor]:
        """Gather layer by layer, each when it is asked for."""
        index = self._index(slots)
        return (pool.index_select(1, index) for pool in self._pools)

    def write(self, slots: Sequence[int], layers: Iterator[torch.Tensor]) -> None:
        """Scatter layer by layer."""
        index = self._index(slots)
        for pool, blocks in zip(self._pools, layers, strict=True):
            pool.index_copy_(1, index, blocks.to(pool.device))

    def close(self) -> None:
        """Have nothing to close."""

    def _index(self, slots: Sequence[int]) -> torch.Tensor:
        return torch.tensor(slots, device=self._pools[0].device)


class Arenas:
    """Carries out the moves of a plan, as many at once as their order allows.

    Parameters
    ----------
    stores
        The arenas that there are.
    """

    def __init__(self, stores: Mapping[Arena, BlockStore]) -> None:
        self._stores = stores

    def num_slots(self, arena: Arena) -> int:
        """Blocks that an arena holds; 0 where there is no such arena."""
        store = self._stores.get(arena)
        return 0 if store is None else store.num_slots

    def carry_out(self, moves: Sequence[Move]) -> tuple[int, ...]:
        """Make the moves, each as if those before it were done; returns the indices of those that failed.

        Only writes to the disk fail. What cannot be read back from there is an error.
        """
        failed: list[Move] = []
        for batch in batches(moves):
            source, target = self._stores[batch[0].source_arena], self._stores[batch[0].target_arena]
            blocks = source.read([move.source for move in batch])
            try:
                target.write([move.target for move in batch], blocks)
            except OSError as error:
                if batch[0].target_arena is not Arena.DISK:
                    raise
                _log.warning("%d cached KV blocks could not be written to the disk: %s", len(batch), error)
                failed += batch
        if not failed:
            return ()
        lost = {id(move) for move in failed}
        return tuple(index for index, move in enumerate(moves) if id(move) in lost)

    def close(self) -> None:
        """Let go of what is not memory."""
        for store in self._stores.values():
            store.close()


def make_arenas(config: EngineConfig, pools: Sequence[torch.Tensor]) -> Arenas:
    """Return the KV pool and whatever else the configuration asks for."""
    stores: dict[Arena, BlockStore] = {Arena.DEVICE: TensorStore(pools)}
    if config.swap_space_bytes:
        swap = allocate_in_host(pools, config.swap_space_bytes, "swap_space_bytes")
        stores[Arena.SWAP] = TensorStore(swap)
    if config.prefix_host_bytes:
        host = allocate_in_host(pools, config.prefix_host_bytes, "prefix_host_bytes")
        stores[Arena.HOST] = TensorStore(host)
    if config.prefix_disk_bytes:
        stores[Arena.DISK] = DiskStore(pools, config.prefix_disk_bytes, config.prefix_disk_path)
    return Arenas(stores)


def batches(moves: Sequence[Move]) -> list[list[Move]]:
    """Gather moves between the same arenas, each into the last batch of its kind that order allows.

    A batch reads before it writes. So a move may not join one that writes what it reads or writes, nor one
    that comes before a batch which reads what it writes. Blocks that go to the host while others make room
    for them there are two batches, however many they are.
    """
    made: list[list[Move]] = []
    latest: dict[tuple[Arena, Arena], int] = {}
    written: dict[tuple[Arena, int], int] = {}
    read: dict[tuple[Arena, int], int] = {}
    for move in moves:
        source, target = (move.source_arena, move.source), (move.target_arena, move.target)
        earliest = max(written.get(source, -1) + 1, written.get(target, -1) + 1, read.get(target, 0))
        kind = (move.source_arena, move.target_arena)
        index = latest.get(kind, -1)
        if index < earliest:
            index = latest[kind] = len(made)
            made.append([])
        made[index].append(move)
        written[target] = index
        read[source] = max(index, read.get(source, 0))
    return made
