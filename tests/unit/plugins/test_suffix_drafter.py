"""`suffix` goes with the majority of what followed, here and elsewhere, within bounded memory."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from conch.api import DraftContext, SpeculativeConfig
from conch_plugins.drafters.corpus import Corpus
from conch_plugins.drafters.suffix import SuffixDrafter


def make(**changes):
    return SuffixDrafter(SpeculativeConfig(method="suffix", **changes))


def draft(drafter, tokens, request_id=1, room=8):
    (drafts,) = drafter.propose(DraftContext([request_id], [tokens], [room]))
    return drafts


def test_a_draft_is_as_long_as_its_match():
    tokens = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    assert draft(make(), tokens) == (4, 5, 6)
    assert draft(make(suffix_decoding_max_spec_factor=2.0), tokens) == (4, 5, 6, 7, 1, 2)
    assert draft(make(suffix_decoding_max_spec_factor=2.0), tokens, room=2) == (4, 5)


def test_the_majority_leads_until_it_is_too_unlikely():
    tokens = [1, 2, 8, 1, 2, 9, 5, 1, 2, 9, 6, 1, 2, 9, 7, 1, 2]
    assert draft(make(suffix_decoding_max_spec_factor=4.0), tokens)[:1] == (9,)
    strict = make(suffix_decoding_max_spec_factor=4.0, suffix_decoding_min_token_prob=0.5)
    assert draft(strict, tokens) == (9,)


def test_outputs_of_others_help():
    drafter = make()
    prompt = [50, 51]
    for end in range(3, 10):
        draft(drafter, [*prompt, *range(1, end)], request_id=1)
    assert draft(drafter, [60, 3, 4, 5], request_id=2) == (), "not before it has ended"
    drafter.forget([1])
    assert draft(drafter, [60, 3, 4, 5], request_id=2) == (6, 7, 8)
    assert draft(drafter, [60, 50, 51], request_id=3) == (), "prompts are nobody's output"


def test_nothing_is_remembered_where_nothing_may_be():
    drafter = make(suffix_decoding_max_cached_requests=0)
    for end in range(3, 10):
        draft(drafter, [50, *range(1, end)], request_id=1)
    drafter.forget([1])
    assert draft(drafter, [60, 3, 4, 5], request_id=2) == ()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), max_size=12), max_size=15),
    st.integers(8, 40),
    st.integers(1, 6),
)
def test_the_corpus_knows_the_latest_outputs_and_no_others(outputs, capacity, most):
    corpus = Corpus(capacity, most)
    for output in outputs:
        corpus.add(output)
    assert len(corpus) <= capacity
    kept: list[list[int]] = []
    for output in reversed([output[1 - capacity :] for output in outputs]):
        if len(output) <= 2:
            continue
        if len(kept) == most or sum(len(one) + 1 for one in [*kept, output]) > capacity:
            break
        kept.append(output)
    wanted = Counter(pair for output in kept for pair in pairwise(output))
    found = {(first, second): len(corpus.places(first, second)) for first in range(5) for second in range(5)}
    assert {pair: count for pair, count in found.items() if count} == {
        pair: min(count, 32) for pair, count in wanted.items()
    }
