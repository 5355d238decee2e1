"""The longest cached prefix first, and nobody starves."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from conch.api import Match
from conch_plugins.schedulers.lpm import PATIENCE, WINDOW, LpmScheduler, MatchLine
from support.scheduling import check_answers, simulate


def lpm(context, clock=None):
    return LpmScheduler(context)


def test_who_is_cached_goes_before_who_came_first():
    simulation = simulate(lpm, max_num_seqs=1, max_num_batched_tokens=64)
    simulation.add(range(16), max_tokens=2)
    simulation.run()
    strangers = [simulation.add([700 + number] * 16, max_tokens=2) for number in range(5)]
    friend = simulation.add([*range(16), 99], max_tokens=2)
    simulation.run()
    assert simulation.admissions == [1, friend.id, *(request.id for request in strangers)]
    check_answers(simulation)


def test_a_small_cache_is_used_before_it_is_evicted():
    def hits(scheduler):
        simulation = simulate(
            scheduler, num_blocks=14, max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64
        )
        for turn in range(24):
            family = turn % 3
            simulation.add([100 * family + number for number in range(30)] + [turn], max_tokens=2)
        simulation.run()
        return sum(sum(plan.cached.values()) for plan in simulation.plans)

    from conch_plugins.schedulers.fcfs import FcfsScheduler

    assert hits(lpm) > 3 * hits(lambda context, clock: FcfsScheduler(context))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), seats=st.integers(1, 3))
def test_nobody_is_overtaken_by_more_than_the_window_and_its_patience(seed, seats):
    draw = random.Random(seed)
    simulation = simulate(
        lpm, num_blocks=30, max_num_seqs=seats, max_num_batched_tokens=32, max_model_len=100
    )
    simulation.add(range(16), max_tokens=1)
    simulation.run()
    for number in range(150):
        favoured = draw.random() < 0.9
        prompt = [*range(16), number] if favoured else [500 + number] * draw.randint(1, 20)
        simulation.add(prompt, max_tokens=draw.randint(1, 3))
        if draw.random() < 0.6:
            simulation.step()
    simulation.run()
    check_answers(simulation)
    for place, one in enumerate(simulation.admissions):
        assert sum(other > one for other in simulation.admissions[:place]) <= WINDOW + PATIENCE


class CountingCache:
    def __init__(self):
        self.asked = 0

    def match(self, request):
        self.asked += 1
        return Match()


def test_a_long_queue_costs_no_more_than_a_short_one():
    cache = CountingCache()
    line = MatchLine(cache)
    simulation = simulate(lpm)
    for number in range(5000):
        line.add(simulation.add([number % 900], max_tokens=1))
    line.refresh()
    before = cache.asked
    assert before == WINDOW
    for _ in range(100):
        line.refresh()
        line.leave(line.first())
    assert cache.asked - before <= 100 * 3
