"""Stands for a draft model, and minds how it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from conch.api import Row

if TYPE_CHECKING:
    from conch.api import DraftModel


class CountingDraftModel:
    """Says of each token that it is its position. Fails when it is asked for KV over a hole, or out of turn.

    Parameters
    ----------
    vocab_size
        Positions are counted modulo this.
    max_model_len, max_num_tokens
        As in `conch.api.DraftModel`.
    """

    def __init__(self, vocab_size: int, max_model_len: int = 100, max_num_tokens: int = 32) -> None:
        self._vocab_size = vocab_size
        self._max_model_len, self._max_num_tokens = max_model_len, max_num_tokens
        self._computed: dict[int, int] = {}
        self._sampled: list[int] = []

    @property
    def max_model_len(self) -> int:
        """Tokens that it can see."""
        return self._max_model_len

    @property
    def max_num_tokens(self) -> int:
        """Tokens that one call of `logits` should have at most."""
        return self._max_num_tokens

    def logits(self, rows: Sequence[Row]) -> Any:  # noqa: ANN401 - no torch here
        """Note what is computed; returns whom logits are for."""
        assert rows, "a call for nothing"
        assert sum(row.count for row in rows) <= self._max_num_tokens
        assert len({row.request_id for row in rows}) == len(rows), "a request has one row at most"
        for row in rows:
            computed = self._computed.get(row.request_id, 0)
            assert row.count > 0 and row.start <= computed, f"KV before {row.start} is not there: {computed}"
            assert row.start + row.count <= self._max_model_len, "past the end of the context"
            self._computed[row.request_id] = row.start + row.count
        self._sampled = [row.request_id for row in rows if row.samples]
        return list(self._sampled)

    def first_held(self, start: int) -> int:
        """Have all blocks."""
        return 0

    def draw(self, request_ids: Sequence[int], logits: Any) -> list[int | None]:  # noqa: ANN401
        """Return each position."""
        assert list(request_ids) == logits == self._sampled, "logits are drawn from once, in their order"
        self._sampled = []
        return [self._computed[request_id] % self._vocab_size for request_id in request_ids]


if TYPE_CHECKING:
    _: type[DraftModel] = CountingDraftModel
