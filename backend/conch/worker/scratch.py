"""Blocks for drafts that are ahead of their request's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from conch.api import Row
from conch.worker.row_table import RowTable


class ScratchBlocks:
    """Stand in the entries after a row's own blocks while a batch is built.

    The target never sees them: its pool does not have them.

    Parameters
    ----------
    table
        What is known of the requests.
    block_size
        Tokens in a block.
    max_num_seqs
        Requests that may draft in a step.
    num_tokens
        Most tokens that are drafted ahead.
    """

    def __init__(self, table: RowTable, block_size: int, max_num_seqs: int, num_tokens: int) -> None:
        self._table, self._block_size, self._max_num_seqs = table, block_size, max_num_seqs
        self._each = -(-num_tokens // block_size)
        self._places: dict[int, int] = {}
        self._first = 0

    @property
    def count(self) -> int:
        """How many there are."""
        return self._max_num_seqs * self._each

    def put_after(self, num_blocks: int) -> None:
        """Learn how many blocks come before them in the pool."""
        self._first = num_blocks

    def begin(self) -> None:
        """Begin a step: all are free again."""
        self._places.clear()

    @contextmanager
    def lent(self, rows: Sequence[Row]) -> Iterator[None]:
        """Let rows have as many as they need besides their own."""
        lent = [self._lend(row) for row in rows]
        try:
            yield
        finally:
            for at, count in lent:
                self._table.set_scratch(at, [0] * count)

    def _lend(self, row: Row) -> tuple[int, int]:
        """Put blocks where the row has none of its own; returns where, and how many."""
        at = self._table.row_of(row.request_id)
        held = self._table.num_blocks[at]
        count = max(0, -(-(row.start + row.count) // self._block_size) - held)
        if count:
            place = self._places.setdefault(row.request_id, len(self._places))
            assert place < self._max_num_seqs, "more requests draft than may run"
            assert count <= self._each, "drafts further ahead than was agreed"
            first = self._first + place * self._each
            self._table.set_scratch(at, range(first, first + count))
        return at, count
