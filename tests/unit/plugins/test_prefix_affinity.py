"""Cached prefix against load: what is found, and how far it may go."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from conch.api import EngineConfig, ReplicaLoad, RoutedRequest
from conch_plugins.routers.placed_prefixes import PlacedPrefixes, block_chain
from conch_plugins.routers.prefix_affinity import PrefixAffinityRouter, allowance, weight

BLOCK = 4
SHARED = tuple(range(100, 140))

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=20).map(tuple)
requests = st.builds(RoutedRequest, prompts, st.sampled_from(["", "red", "blue"]))
counts = st.integers(0, 40)


def idle(count=2, first=0):
    return [ReplicaLoad(first + index, 0, 0, 0.0) for index in range(count)]


def loads_of(engines):
    return st.lists(
        st.tuples(st.sampled_from(engines), counts, counts, st.floats(0, 1)),
        min_size=1,
        max_size=len(engines),
        unique_by=lambda one: one[0],
    ).map(lambda all: [ReplicaLoad(*one) for one in all])


def common_blocks(one, other):
    """Whole blocks that two prompts share, the last token of the first never covered."""
    shared = 0
    while shared < min(len(one) - 1, len(other)) and one[shared] == other[shared]:
        shared += 1
    return min(shared, len(one) - 1, len(other) - 1) // BLOCK


@given(st.lists(st.tuples(requests, loads_of([0, 1, 2, 3]), st.integers(0, 3)), max_size=40))
def test_the_chosen_replica_is_hardly_busier_than_the_least_busy(trace):
    router = PrefixAffinityRouter(BLOCK, capacity=50)
    for request, loads, restarted in trace:
        changed = [ReplicaLoad(10 * restarted + one.engine, one.running, one.waiting, 0.5) for one in loads]
        least = min(weight(load) for load in changed)
        chosen = changed[router.place(request, changed)]
        assert weight(chosen) <= least + allowance(least)
        assert router.num_remembered <= 50 * len(changed)


@given(st.lists(requests, max_size=30), requests)
def test_overlap_is_the_longest_common_prefix_in_blocks_under_one_salt(sent, asked):
    placed = PlacedPrefixes(capacity=1000)
    for request in sent:
        placed.remember(block_chain(request, BLOCK))
    known = [one.token_ids for one in sent if one.cache_salt == asked.cache_salt]
    longest = max((common_blocks(asked.token_ids, one) for one in known), default=0)
    assert placed.overlap(block_chain(asked, BLOCK)) == longest


@given(st.lists(requests, max_size=30), st.integers(0, 8))
def test_memory_is_bounded_and_ends_are_forgotten_before_beginnings(sent, capacity):
    placed = PlacedPrefixes(capacity)
    for request in sent:
        chain = block_chain(request, BLOCK)
        placed.remember(chain)
        assert len(placed) <= capacity
        assert placed.overlap(chain) == min(len(chain), capacity)


@given(st.lists(st.tuples(prompts, loads_of([0, 1, 2])), max_size=30))
def test_salts_of_ones_own_leave_only_load_to_choose_by(trace):
    router = PrefixAffinityRouter(BLOCK)
    for number, (prompt, loads) in enumerate(trace):
        chosen = loads[router.place(RoutedRequest(prompt * 3, f"salt {number}"), loads)]
        assert weight(chosen) == min(weight(load) for load in loads)


def test_a_prompt_goes_where_its_prefix_was_sent():
    router = PrefixAffinityRouter(BLOCK)
    first = router.place(RoutedRequest(SHARED), idle(4))
    for tail in range(5):
        assert router.place(RoutedRequest((*SHARED, tail, tail, tail)), idle(4)) == first
    assert Counter(
        router.place(RoutedRequest(SHARED, f"salt {n}"), idle(4)) for n in range(8)
    ) == dict.fromkeys(range(4), 2)


def test_a_system_prompt_of_everybody_spreads_over_all_replicas():
    router, running = PrefixAffinityRouter(BLOCK), [0, 0, 0, 0]
    for number in range(200):
        loads = [ReplicaLoad(index, count, 0, 0.0) for index, count in enumerate(running)]
        running[router.place(RoutedRequest((*SHARED, number, number)), loads)] += 1
    assert max(running) - min(running) <= allowance(min(running))
    assert max(running) - min(running) <= 5


def test_a_small_overlap_is_not_worth_a_busy_replica():
    router = PrefixAffinityRouter(BLOCK)
    first = router.place(RoutedRequest(SHARED), idle())
    busy = [ReplicaLoad(index, 2 if index == first else 0, 0, 0.0) for index in range(2)]
    little = RoutedRequest((*SHARED[: 2 * BLOCK], *range(40)))
    assert router.place(little, busy) != first
    assert router.place(RoutedRequest((*SHARED, 1)), busy) == first


def test_nobody_waits_for_a_cached_prefix_beside_a_replica_without_a_queue():
    router = PrefixAffinityRouter(BLOCK)
    first = router.place(RoutedRequest(SHARED), idle())
    loads = [ReplicaLoad(index, 2, 2 * (index == first), 0.0) for index in range(2)]
    assert router.place(RoutedRequest((*SHARED, 1)), loads) != first


def test_a_replica_that_was_started_anew_has_nothing_cached():
    router = PrefixAffinityRouter(BLOCK)
    router.place(RoutedRequest(SHARED), idle())
    assert router.num_remembered == (len(SHARED) - 1) // BLOCK
    router.place(RoutedRequest((1,)), idle(2, first=2))
    assert router.num_remembered == 0
    placed = [router.place(RoutedRequest(SHARED), idle(2, first=first)) for first in (10, 20, 30, 40)]
    assert Counter(placed) == {0: 2, 1: 2}


def test_without_a_prefix_cache_nothing_is_remembered():
    for settings in ({"enable_prefix_caching": False}, {"prefix_cache": "none"}):
        router = PrefixAffinityRouter.from_config(EngineConfig(model="none", **settings))
        placed = Counter(router.place(RoutedRequest(range(200)), idle()) for _ in range(10))
        assert placed == {0: 5, 1: 5} and router.num_remembered == 0
