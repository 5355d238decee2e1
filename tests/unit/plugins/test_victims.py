"""Who is preempted, who is admitted beside others, and that it comes to an end."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conch.testing import Simulation, make_context
from conch_plugins.schedulers.fcfs import FcfsScheduler

POLICIES = ("least_loss", "last_admitted")


def simulate(num_blocks=16, **config):
    context = make_context(num_blocks=num_blocks, **config)
    return Simulation(FcfsScheduler(context), context)


def first_victims(simulation):
    """Step until somebody is preempted."""
    while not (simulation.plans and simulation.plans[-1].preempted):
        simulation.step()
    return simulation.plans[-1].preempted


@pytest.mark.parametrize(("policy", "victim"), [("least_loss", 2), ("last_admitted", 3)])
def test_whoever_has_the_least_to_compute_again_goes(policy, victim):
    simulation = simulate(preemption_victim=policy, enable_prefix_caching=False)
    for length in (20, 3, 24):
        simulation.add([length] * length, max_tokens=30)
    assert first_victims(simulation) == (victim,)
    simulation.run()
    simulation.check_idle()


def test_of_equals_the_last_goes():
    simulation = simulate()
    for number in range(3):
        simulation.add([number] * 10, max_tokens=30)
    assert first_victims(simulation) == (3,)


def test_what_others_share_is_not_lost():
    """Two choices of a long prompt have less to compute again than a short request of its own."""
    simulation = simulate(num_blocks=18, max_num_batched_tokens=64)
    simulation.add(range(100, 108), max_tokens=40)
    simulation.add(range(33), max_tokens=12, choices=2)
    victims = first_victims(simulation)
    assert victims[0] in (2, 3)
    simulation.run()
    simulation.check_idle()


def test_whoever_would_free_nothing_is_spared():
    """A choice that has not written yet holds no block of its own: to preempt it would be in vain."""
    simulation = simulate(num_blocks=12, max_num_seqs=3, enable_prefix_caching=False)
    policy = simulation.scheduler._begin.keywords["kv"].victims
    simulation.add([1] * 8, max_tokens=20)
    simulation.add([2] * 12, max_tokens=20, choices=2)
    simulation.step()
    alone, parent, fork = simulation.running
    manager = simulation.context.kv_manager
    assert manager.release_effect(fork.id).num_freed == 0 < manager.release_effect(alone.id).num_freed
    assert policy.choose([alone, parent, fork]) is alone


@given(seed=st.integers(0, 10_000), policy=st.sampled_from(POLICIES), swap=st.booleans())
@settings(max_examples=60, deadline=None)
def test_nobody_is_preempted_before_it_has_brought_a_token(seed, policy, swap):
    """Unless nobody else could be. So preemptions are no more than tokens, and all requests end."""
    draw = random.Random(seed)
    mode = {"preemption_mode": "swap", "swap_space_bytes": 20} if swap else {}
    simulation = simulate(
        draw.randint(9, 20),
        max_num_seqs=draw.randint(2, 6),
        max_num_batched_tokens=draw.randint(6, 20),
        enable_prefix_caching=draw.choice([True, False]),
        preemption_victim=policy,
        **mode,
    )
    pool = simulation.context.num_blocks * 4
    for number in range(10):
        length = draw.randint(1, 20)
        simulation.add([number] * length, max_tokens=draw.randint(1, pool - length))
    spared = 0
    while simulation.running or simulation.waiting:
        advanced = {request.id for request in simulation.running if request.has_advanced}
        plan = simulation.step()
        for victim in plan.preempted:
            spared += victim not in advanced
            assert victim in advanced or not advanced
            advanced.discard(victim)
    simulation.check_idle()
    brought = sum(request.num_tokens - request.num_prompt for request in simulation.ended)
    assert sum(len(plan.preempted) for plan in simulation.plans) <= brought + spared
    assert len(simulation.ended) == 10


@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_an_admission_beside_others_leaves_the_watermark(seed):
    draw = random.Random(seed)
    simulation = simulate(kv_watermark=0.25)
    for number in range(12):
        length = draw.randint(1, 30)
        simulation.add([number] * length, max_tokens=draw.randint(1, 64 - length))
    admissions, free = 0, []
    simulation.step_seconds = lambda plan: free.append(simulation.context.kv_manager.free_blocks) or 1.0
    while simulation.running or simulation.waiting:
        before = len(simulation.running)
        plan = simulation.step()
        if plan.admitted and before + len(plan.admitted) > 1:
            admissions += 1
            assert free[-1] >= 4
    assert admissions > 0


@pytest.mark.parametrize("watermark", [0, 0.5, 0.99])
def test_one_alone_is_admitted_however_large(watermark):
    simulation = simulate(kv_watermark=watermark)
    for number in range(3):
        simulation.add([number] * 50, max_tokens=14)
    simulation.run()
    simulation.check_idle()
    assert len(simulation.ended) == 3
    assert not any(plan.preempted for plan in simulation.plans)


def test_a_watermark_saves_preemptions():
    def preemptions(watermark):
        count = 0
        for seed in range(10):
            draw = random.Random(seed)
            simulation = simulate(40, kv_watermark=watermark)
            for number in range(30):
                simulation.add([number] * draw.randint(1, 20), max_tokens=draw.randint(10, 40))
            simulation.run()
            count += sum(len(plan.preempted) for plan in simulation.plans)
        return count

    assert preemptions(0.2) < preemptions(0) / 2
