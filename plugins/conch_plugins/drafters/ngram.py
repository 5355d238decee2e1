"""`ngram`: what followed the last tokens when they stood there before (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from conch.api import DraftContext

if TYPE_CHECKING:
    from conch.api import Drafter

_FEW = 8

Tokens = npt.NDArray[np.int32]


class NgramDrafter:
    """Copies what came after the latest of the longest matches of a request's last tokens in its own tokens.

    Stateless: a search is a few passes of numpy over the tokens.

    Parameters
    ----------
    shortest, longest
        Tokens that a match has.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest

    def propose(self, context: DraftContext) -> list[tuple[int, ...]]:
        """Look up each row that has room."""
        return [
            self._look_up(np.asarray(tokens, np.int32), room) if room else ()
            for tokens, room in zip(context.token_ids, context.room, strict=True)
        ]

    def forget(self, request_ids: Sequence[int]) -> None:
        """Have nothing to drop."""

    def _look_up(self, tokens: Tokens, room: int) -> tuple[int, ...]:
        ends, length = longest_matches(tokens, self._longest)
        if length < self._shortest:
            return ()
        return tuple(repeat_from(tokens, int(ends[-1]) + 1, room))


def longest_matches(tokens: Tokens, longest: int) -> tuple[npt.NDArray[np.int64], int]:
    """Find where the last tokens stood before: the ends of the longest matches, up to `longest` tokens.

    Returns
    -------
    int64 [C]
        Index of the last token of each match, rising; empty where even the last token is new.
    int
        Tokens in each of them, 0 for none.
    """
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:-1] == tokens[last]) if last > 0 else np.empty(0, np.int64)
    if len(ends) <= _FEW:
        return _longest_of_few(tokens, ends, longest)
    for length in range(1, longest):
        if last < length:
            return ends, length
        further = ends[ends >= length]
        further = further[tokens[further - length] == tokens[last - length]]
        if not len(further):
            return ends, length
        ends = further
    return ends, longest


def _longest_of_few(
    tokens: Tokens, ends: npt.NDArray[np.int64], longest: int
) -> tuple[npt.NDArray[np.int64], int]:
    """Do the same one by one, which takes less than numpy's calls would."""
    wanted = tokens[-longest:].tolist()[::-1]
    lengths = [
        _common_length(wanted, tokens[max(0, end - longest + 1) : end + 1].tolist()[::-1])
        for end in ends.tolist()
    ]
    length = max(lengths, default=0)
    return ends[[each == length for each in lengths]] if length else ends[:0], length


def _common_length(one: list[int], other: list[int]) -> int:
    """Return how many tokens two lists have in common at their beginning."""
    for length, (left, right) in enumerate(zip(one, other)):  # noqa: B905 - one may be shorter
        if left != right:
            return length
    return min(len(one), len(other))


def repeat_from(tokens: Tokens, start: int, count: int) -> list[int]:
    """Copy `count` tokens from `start` on; past the end the copy itself goes on."""
    copied: list[int] = tokens[start : start + count].tolist()
    while len(copied) < count:
        copied += copied[: count - len(copied)]
    return copied


if TYPE_CHECKING:
    _: type[Drafter] = NgramDrafter
