"""Blocks of one size, with reference counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from conch.api import NO_BLOCK, BlockUpdate, Move, PrefixCache, ReleaseEffect

_ALL = 1 << 62


class PagedKVManager:
    """Hands out blocks on demand, shares them between requests and copies them before a write.

    Every block is in one of three states: referenced by one or more tables, kept by the prefix cache without
    a reference (evictable), or free. All methods take time in the number of blocks that they touch.

    Parameters
    ----------
    num_blocks
        Blocks in the pool.
    block_size
        Tokens in a block.
    prefix_cache
        Asked to keep a block whose last user leaves, and to evict when no block is free.
    reach
        Tokens that a query sees at most, itself included; None for all. Blocks behind that are given up.
    """

    def __init__(
        self, num_blocks: int, block_size: int, prefix_cache: PrefixCache, reach: int | None = None
    ) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._cache = prefix_cache
        self._reach = _ALL if reach is None else reach
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._tables: dict[int, list[int]] = {}

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._num_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allotted now, evictable ones included."""
        return len(self._free) + self._cache.num_evictable

    def adopt(self, request_id: int, blocks: Sequence[int]) -> None:
        """Begin a table with shared blocks."""
        assert request_id not in self._tables, f"request {request_id} has a table"
        for block in blocks:
            if block == NO_BLOCK:
                continue
            if self._references[block] == 0:
                self._cache.reuse(block)
            self._references[block] += 1
        self._tables[request_id] = list(blocks)

    def grow(self, request_id: int, start: int, end: int) -> BlockUpdate | None:
        """Make room for tokens ``[start, end)``, with shared blocks replaced by blocks of its own.

        KV before `start` is in place and must survive; nothing at or after it has a value yet. So only the
        block that holds both can need a copy: the others are replaced without. The prefix cache can hold that
        block, too, where a fork left a full block in its middle.
        """
        table = self._tables.get(request_id, [])
        size, index = self._block_size, start // self._block_size
        is_inside = index < len(table) and index * size < end <= (index + 1) * size
        if is_inside and not self._is_shared(table[index]):  # so it is for nearly every token decoded
            return BlockUpdate(len(table), ())
        return self._grow_table(request_id, table, start, end)

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Share the parent's blocks that cover its first `num_tokens` tokens."""
        blocks = self._tables.get(parent_id, [])[: -(-num_tokens // self._block_size)]
        assert len(blocks) * self._block_size >= num_tokens, "the parent does not hold that many tokens"
        self.adopt(child_id, blocks)

    def release(self, request_id: int) -> None:
        """Drop every reference of a request.

        From the tail: the prefix cache evicts what came first, and a prefix without its tail is still of use.
        """
        for block in reversed(self._tables.pop(request_id, [])):
            if block == NO_BLOCK:
                break
            self._drop(block)

    def release_effect(self, request_id: int) -> ReleaseEffect:
        """Count the blocks that nobody else holds, and the leading ones that stay cached."""
        table, references = self._tables.get(request_id, []), self._references
        kept = 0
        while kept < len(table) and self._stays_cached(table[kept]):
            kept += 1
        freed = sum(references[block] == 1 for block in table if block != NO_BLOCK)
        return ReleaseEffect(freed, kept * self._block_size)

    def blocks(self, request_id: int) -> Sequence[int]:
        """Block table of a request; a live view."""
        return self._tables.get(request_id, ())

    def check_integrity(self) -> None:
        """Raise AssertionError when a block is leaked, lost, or free while referenced."""
        counted: Counter[int] = Counter()
        for request_id, table in self._tables.items():
            held = [block for block in table if block != NO_BLOCK]
            assert len(set(held)) == len(held), f"request {request_id} holds a block twice: {table}"
            assert table[len(table) - len(held) :] == held, f"request {request_id} has a hole: {table}"
            counted.update(held)
        for block, references in enumerate(self._references):
            assert references == counted[block], (
                f"block {block}: {references} references, {counted[block]} users"
            )
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & counted.keys(), f"blocks are free while referenced: {sorted(free & counted.keys())}"
        kept = self._num_blocks - len(free) - len(counted)
        evictable = self._cache.num_evictable
        assert kept == evictable, f"{kept} blocks are neither free nor in use, and {evictable} evictable"

    def _grow_table(self, request_id: int, table: list[int], start: int, end: int) -> BlockUpdate | None:
        size, held = self._block_size, len(table)
        assert start <= held * size, f"request {request_id} would leave a hole before token {start}"
        self._give_up_behind(table, start)
        first, needed = start // size, -(-end // size)
        shared = [index for index in range(first, min(needed, held)) if self._is_shared(table[index])]
        fresh = self._take(max(0, needed - held) + len(shared))
        if fresh is None:
            return None
        moves = []
        for index in shared:
            source, target = table[index], fresh.pop()
            self._drop(source)
            table[index] = target
            if start > index * size:
                moves.append(Move(source, target))
        table += fresh
        self._tables[request_id] = table
        changed = shared[0] if shared else held
        return BlockUpdate(changed, tuple(table[changed:]), tuple(moves))

    def _give_up_behind(self, table: list[int], start: int) -> None:
        """Give up blocks that no token from `start` on can see; from their tail, as in `release`."""
        for index in range(min((start - self._reach + 1) // self._block_size, len(table)) - 1, -1, -1):
            if table[index] == NO_BLOCK:
                return
            self._drop(table[index])
            table[index] = NO_BLOCK

    def _stays_cached(self, block: int) -> bool:
        return block != NO_BLOCK and self._references[block] > 1 and self._cache.holds(block)

    def _is_shared(self, block: int) -> bool:
        return self._references[block] > 1 or self._cache.holds(block)

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0 and not self._cache.keep(block):
            self._free.append(block)

    def _take(self, count: int) -> list[int] | None:
        """Take blocks that nobody uses and give each its first reference; None where there are too few."""
        if count > self.free_blocks:
            return None
        if count == 0:
            return []
        short = count - len(self._free)
        if short > 0:
            self._free += self._cache.evict(short)
        taken = self._free[-count:]
        assert len(taken) == count, "the prefix cache evicted fewer blocks than it has"
        del self._free[-count:]
        for block in taken:
            self._references[block] = 1
        return taken
