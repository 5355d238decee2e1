"""A long prompt never blocks the short ones behind it."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conch.api import PlanBuilder
from conch_plugins.schedulers.fcfs import FcfsScheduler
from support.scheduling import check_answers, counts, simulate, steps_to_first_token


def fcfs(context, clock):
    return FcfsScheduler(context)


class Simplest:
    """What a plugin author writes first: pays all, then admits in the order given."""

    def __init__(self, context, clock=None):
        self.begin = PlanBuilder.for_context(context)

    def plan(self, requests):
        builder = self.begin(requests)
        builder.pay_all(requests.running)
        for request in requests.waiting:
            if builder.has_preempted or not builder.admit(request):
                break
        return builder.build()


def roomy(scheduler, budget, **settings):
    return simulate(
        scheduler,
        num_blocks=4000,
        max_num_seqs=16,
        max_num_batched_tokens=budget,
        max_model_len=2000,
        enable_prefix_caching=False,
        **settings,
    )


@settings(max_examples=40, deadline=None)
@given(
    budget=st.integers(24, 40),
    longs=st.lists(st.integers(60, 200), min_size=1, max_size=9),
    short=st.integers(1, 59),
    steps=st.integers(0, 5),
    decodes=st.integers(0, 5),
)
def test_a_short_prompt_behind_many_long_ones_waits_for_its_own_tokens_only(
    budget, longs, short, steps, decodes
):
    simulation = roomy(fcfs, budget)
    for number in range(decodes):
        simulation.add([number], max_tokens=200)
    simulation.step()
    for number, length in enumerate(longs):
        simulation.add([100 + number] * length, max_tokens=2)
    for _ in range(steps):
        simulation.step()
    request = simulation.add([7] * short, max_tokens=2)
    decoding = decodes + len(longs)  # a long prompt may be done by then
    assert steps_to_first_token(simulation, request) <= math.ceil(2 * short / (budget - decoding)) + 1
    simulation.run()
    check_answers(simulation)


@settings(max_examples=40, deadline=None)
@given(
    budget=st.integers(16, 40),
    long=st.integers(100, 300),
    seed=st.integers(0, 1000),
    load=st.floats(0.1, 3.0),
)
def test_a_long_prompt_keeps_half_its_pace_whatever_comes_after_it(budget, long, seed, load):
    draw = random.Random(seed)
    simulation = roomy(fcfs, budget)
    request = simulation.add([5] * long, max_tokens=1)
    while request not in simulation.ended:
        for _ in range(int(load) + (draw.random() < load % 1)):
            simulation.add([draw.randint(10, 99)] * draw.randint(1, budget), max_tokens=1)
        simulation.step()
    assert len(simulation.plans) <= math.ceil(2 * long / budget)
    simulation.run()
    check_answers(simulation)


def test_equal_prompts_are_computed_one_after_the_other():
    simulation = roomy(fcfs, 16)
    requests = [simulation.add([number] * 16, max_tokens=4) for number in range(6)]
    firsts = []
    for _ in range(14):
        simulation.step()
        firsts += [r.id for r in requests if r.num_tokens == r.num_prompt + 1 and r.id not in firsts]
    assert firsts == [request.id for request in requests]
    assert counts(simulation.plans[0]) == {1: 16}


def test_what_nobody_else_takes_goes_to_the_long_prompt():
    simulation = roomy(fcfs, 32)
    long = simulation.add([1] * 200, max_tokens=1)
    simulation.add([2] * 3, max_tokens=1)
    assert counts(simulation.step()) == {long.id: 29, 2: 3}
    assert counts(simulation.step()) == {long.id: 32}


def test_seats_are_given_in_order_and_not_to_the_shortest():
    simulation = simulate(fcfs, max_num_seqs=2, max_num_batched_tokens=32)
    for length in (20, 9, 1):
        simulation.add([length] * length, max_tokens=5)
    assert list(counts(simulation.step())) == [1, 2]


def test_blocks_that_the_next_in_order_needs_are_left_to_it():
    simulation = simulate(
        fcfs, num_blocks=20, max_num_seqs=8, max_num_batched_tokens=16, enable_prefix_caching=False
    )
    for length, number in ((40, 1), (39, 2), (3, 3)):
        simulation.add([number] * length, max_tokens=1)
    simulation.run()
    assert simulation.admissions == [1, 2, 3]
    check_answers(simulation)


def test_the_simplest_scheduler_shares_too():
    simulation = roomy(Simplest, 32)
    long = simulation.add([1] * 300, max_tokens=1)
    simulation.step()
    short = simulation.add([2] * 12, max_tokens=1)
    assert counts(simulation.step()) == {long.id: 20, short.id: 12}
    simulation.run()
    check_answers(simulation)


@pytest.mark.parametrize("scheduler", [fcfs, Simplest])
def test_a_shared_step_is_a_full_one(scheduler):
    simulation = roomy(scheduler, 48)
    for length in (400, 300, 5, 200, 90, 1):
        simulation.add([length % 97] * length, max_tokens=1)
    for _ in range((400 + 300 + 5 + 200 + 90 + 1) // 48):
        assert simulation.step().num_tokens == 48
    simulation.run()
    check_answers(simulation)
