"""Stands for a head on hidden states, and minds how it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from conch.api import Row

if TYPE_CHECKING:
    from conch.api import DraftHead


class CountingDraftHead:
    """Says of each token that it is its position. Fails when it is asked out of turn.

    Parameters
    ----------
    vocab_size
        Positions are counted modulo this.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._ends: dict[int, int] = {}
        self._sampled: list[int] = []

    def logits(self, rows: Sequence[Row]) -> Any:  # noqa: ANN401 - no torch here
        """Note what is computed; returns whom logits are for."""
        assert rows, "a call for nothing"
        assert len({row.request_id for row in rows}) == len(rows), "a request has one row at most"
        for row in rows:
            assert row.count > 0, "a row of nothing"
            self._ends[row.request_id] = row.start + row.count
        self._sampled = [row.request_id for row in rows if row.samples]
        return list(self._sampled)

    def draw(self, request_ids: Sequence[int], logits: Any) -> list[int | None]:  # noqa: ANN401
        """Return the position of each."""
        assert list(request_ids) == logits == self._sampled, "logits are drawn from once, in their order"
        self._sampled = []
        return [(self._ends[request_id] + 1) % self._vocab_size for request_id in request_ids]


if TYPE_CHECKING:
    _: type[DraftHead] = CountingDraftHead
