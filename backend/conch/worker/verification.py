"""Which of the sampled tokens count, where drafts were guessed ahead.

Each position of a row is sampled with its own random number, as if no draft had been there. A draft that
equals what was sampled at its place makes the next place valid; the first that differs ends it. So the tokens
are those of a run without drafts, whatever the drafter guesses, greedy or not.
"""

from __future__ import annotations

from collections.abc import Sequence


def accepted_count(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many of `sampled` (one more than `drafts`) count: the drafts that were right, and one."""
    for index, draft in enumerate(drafts):
        if draft != sampled[index]:
            return index + 1
    return len(drafts) + 1
