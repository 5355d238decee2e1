"""`ngram` continues the latest of the longest matches."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from conch.api import DraftContext
from conch_plugins.drafters.ngram import NgramDrafter, longest_matches


def draft(tokens, room=4, shortest=1, longest=3):
    (drafts,) = NgramDrafter(shortest, longest).propose(DraftContext([1], [tokens], [room]))
    return drafts


def test_it_copies_what_followed():
    assert draft([1, 2, 3, 4, 5, 9, 1, 2, 3]) == (4, 5, 9, 1)
    assert draft([1, 2, 3, 4, 5, 9, 1, 2, 3], room=2) == (4, 5)


def test_the_longest_match_counts_before_the_latest():
    assert draft([1, 2, 3, 7, 3, 8, 1, 2, 3], room=1) == (7,)
    assert draft([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], room=1) == (8,), "of equally long ones the latest"


def test_a_period_goes_on():
    assert draft([5, 6, 5, 6, 5, 6], room=5) == (5, 6, 5, 6, 5)
    assert draft([4, 4], room=3) == (4, 4, 4)


def test_short_matches_do_not_count():
    tokens = [1, 2, 3, 9, 2, 3]
    assert draft(tokens, shortest=2, room=1) == (9,)
    assert draft(tokens, shortest=3, room=1) == ()


def test_nothing_is_guessed_without_a_match_or_room():
    assert draft([1]) == () and draft([1, 2, 3]) == () and draft([4, 4], room=0) == ()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 5))
def test_matches_are_those_of_a_plain_search(tokens, longest):
    ends, length = longest_matches(np.array(tokens, np.int32), longest)
    last = len(tokens) - 1
    wanted: list[int] = []
    for size in range(longest, 0, -1):
        pattern = tokens[last - size + 1 :]
        wanted = [end for end in range(size - 1, last) if tokens[end - size + 1 : end + 1] == pattern]
        if wanted and size <= last:
            break
        wanted = []
    assert ends.tolist() == wanted
    assert length == (size if wanted else 0)
