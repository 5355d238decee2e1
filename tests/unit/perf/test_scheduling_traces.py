from __future__ import annotations

from itertools import islice

import pytest
from chat_trace import chats
from hypothesis import given
from hypothesis import strategies as st
from oracle_cache import OracleCache
from planning_runs import Run, answer
from planning_trace import BLOCK_SIZE, DOCUMENT_BLOCKS, Job, PlanningTrace, document

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=8)


@given(SEQUENCES, st.lists(st.integers(0, 2), max_size=8))
def test_the_oracle_finds_the_longest_prefix_of_all_that_it_was_told(known, asked):
    cache = OracleCache()
    for tokens in known:
        cache.insert(tokens)
    longest = max(
        (
            length
            for tokens in known
            for length in range(len(tokens) + 1)
            if tokens[:length] == asked[:length]
        ),
        default=0,
    )
    assert cache.longest(asked) == longest


def test_the_oracle_goes_on_from_where_a_sequence_ended():
    cache = OracleCache()
    end = cache.insert([1, 2])
    cache.insert([3], end)
    assert cache.longest([1, 2, 3, 4]) == 3
    assert cache.longest([3]) == 0


def test_chats_share_system_prompts_and_are_the_same_for_a_seed():
    some = chats(60, seed=3)
    assert some == chats(60, seed=3) != chats(60, seed=4)
    systems = {chat.system_tokens for chat in some}
    assert 1 < len(systems) <= 8
    assert max(len(chat.turns) for chat in some) > 1


def test_documents_fill_the_cache_and_prompts_begin_with_a_part_of_one_or_with_nothing_known():
    trace = PlanningTrace(rows=40, cached_blocks=3 * DOCUMENT_BLOCKS, decode_steps=10)
    documents = trace.documents()
    assert [len(job.token_ids) for job in documents] == [DOCUMENT_BLOCKS * BLOCK_SIZE] * 3
    assert all(job.max_tokens == 1 for job in documents)
    starts = {job.token_ids[:BLOCK_SIZE] for job in documents}
    known = [job.token_ids[:BLOCK_SIZE] in starts for job in trace.first()]
    assert 0 < sum(known) < len(known)


def test_nobody_ends_while_all_decode_and_whoever_comes_later_is_different():
    trace = PlanningTrace(rows=40, cached_blocks=300, decode_steps=100)
    assert min(job.max_tokens for job in trace.first()) > 100
    assert trace.first() == trace.first()
    later = list(islice(trace.later(), 40))
    assert {job.token_ids for job in later}.isdisjoint(job.token_ids for job in trace.first())
    assert document(1, 40)[:20] == document(1, 20)


class CountingHost:
    """Serves every request a token a step; its steps cost a microsecond a request."""

    def __init__(self) -> None:
        self.left: list[int] = []

    def prepare(self, job: Job) -> int:
        return job.max_tokens

    def step(self, arrivals: list[int]) -> Run:
        self.left += arrivals
        tokens = len(self.left)
        self.left = [left - 1 for left in self.left if left > 1]
        return Run(1e-6 * tokens, tokens, tokens - len(self.left))

    def clear(self) -> None:
        self.left = []

    def counts(self) -> dict[str, int]:
        return {"hit_tokens": 0, "preemptions": 0}


def test_a_trace_is_played_in_two_parts_and_costs_are_by_row():
    host = CountingHost()
    answer(host, {"fill": 2 * DOCUMENT_BLOCKS})
    assert not host.left
    found = answer(host, {"rows": 8, "cached_blocks": 200, "decode_steps": 30, "churn_steps": 50})
    assert found["decode_us_per_row"]["median"] == found["churn_us_per_row"]["median"] == pytest.approx(1)
    assert found["decode_us_per_row"]["steps"] > 10
    assert found["churn_us_per_row"]["steps"] == 50
    assert found["churn_ended"] > 0
    assert not host.left


def test_a_trace_in_which_prompts_outlast_the_decodes_is_refused():
    host = CountingHost()
    with pytest.raises(RuntimeError, match="decode_steps"):
        answer(host, {"rows": 300, "cached_blocks": 200, "decode_steps": 1, "churn_steps": 5})
