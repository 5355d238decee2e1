"""Running decodes keep their pace, and the earliest deadline goes first."""

from __future__ import annotations

import random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from conch_plugins.schedulers.fcfs import FcfsScheduler
from conch_plugins.schedulers.slo import LATE_TURN, LEAST_SHARE, SloScheduler, deadline
from conch_plugins.schedulers.step_time import StepLoad, StepTimeModel
from support.scheduling import check_answers, simulate

TRUTH = (0.004, 0.00011, 0.0003, 0.0000004, 1e-8)


def slo(context, clock):
    return SloScheduler(context, clock)


def fcfs(context, clock):
    return FcfsScheduler(context)


def true_seconds(load):
    a, b, c, d, e = TRUTH
    tokens = a + b * load.prefill_tokens + c * load.decode_rows + d * load.context_tokens
    return tokens + e * load.prefill_pairs


def mixed_load(draw):
    prefill = draw.choice([0, draw.randint(2, 512)])
    return StepLoad(prefill, draw.randint(0, 64), draw.randint(1, 60_000), prefill * draw.randint(1, 6000))


@pytest.mark.parametrize("seed", range(5))
def test_the_model_learns_the_truth_from_noisy_steps(seed):
    draw, model = random.Random(seed), StepTimeModel()
    for _ in range(300):
        load = mixed_load(draw)
        model.learn(load, true_seconds(load) * draw.uniform(0.97, 1.03))
    for _ in range(50):
        load = mixed_load(draw)
        assert model.expect(load) == pytest.approx(true_seconds(load), rel=0.1, abs=0.0005)


def test_the_model_follows_a_machine_that_slows_down():
    draw, model = random.Random(1), StepTimeModel()
    for factor in (1.0, 3.0):
        for _ in range(1500):
            load = mixed_load(draw)
            model.learn(load, factor * true_seconds(load))
    load = StepLoad(256, 32, 20_000)
    assert model.expect(load) == pytest.approx(3 * true_seconds(load), rel=0.05)


def test_the_model_survives_long_monotony_and_interruptions():
    draw, model = random.Random(1), StepTimeModel()
    for _ in range(200):
        load = mixed_load(draw)
        model.learn(load, true_seconds(load))
    for step in range(20_000):
        load = StepLoad(0, 8, 4000)
        model.learn(load, 30.0 if step % 5000 == 100 else true_seconds(load))
    for load in (StepLoad(0, 8, 4000), StepLoad(300, 8, 4300)):
        assert model.expect(load) == pytest.approx(true_seconds(load), rel=0.25)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), target=st.floats(0.008, 0.04), load=st.floats(0.02, 0.3))
def test_decodes_keep_their_target_once_the_model_knows(seed, target, load):
    draw, budget = random.Random(seed), 256
    simulation = simulate(
        slo,
        num_blocks=3000,
        step_seconds=lambda plan: true_seconds(StepLoad.of(plan)),
        max_num_seqs=12,
        max_num_batched_tokens=budget,
        max_model_len=1000,
        enable_prefix_caching=False,
    )
    lateness, taught = [], 0
    for _ in range(150):
        if draw.random() < load:
            simulation.add(
                [draw.randint(1, 900)] * draw.randint(1, 400), draw.randint(1, 40), tpot_target_s=target
            )
        before = simulation.now_s
        plan = simulation.step()
        if plan is None:
            continue
        did = StepLoad.of(plan)
        shares = did.decode_rows > 0 and did.prefill_tokens > budget // LEAST_SHARE
        if shares and taught > 8:
            lateness.append((simulation.now_s - before) / target)
        taught += shares
    assert not lateness or max(lateness) < 1.05, "prompts took more than the decodes could spare"
    event(f"steps in which prompts shared with decodes: {min(3, len(lateness))} or more")


def test_a_long_prompt_takes_what_a_decode_can_spare_and_no_more():
    def took(target):
        simulation = simulate(
            slo,
            num_blocks=3000,
            step_seconds=lambda plan: true_seconds(StepLoad.of(plan)),
            max_num_seqs=4,
            max_num_batched_tokens=256,
            max_model_len=3000,
            enable_prefix_caching=False,
        )
        for number in range(12):
            simulation.add([number] * (20 * number + 5), max_tokens=4, tpot_target_s=target)
        simulation.run()
        simulation.add([1, 2], max_tokens=60, tpot_target_s=target)
        simulation.step()
        simulation.add([3] * 1500, max_tokens=1, tpot_target_s=target)
        plan, before = simulation.step(), simulation.now_s
        simulation.step()
        return StepLoad.of(plan).prefill_tokens, simulation.now_s - before

    tight, tight_s = took(0.012)
    loose, loose_s = took(0.024)
    assert 16 < tight < loose < 255
    assert 0.9 * 0.012 < tight_s < 1.02 * 0.012
    assert 0.9 * 0.024 < loose_s < 1.02 * 0.024


def test_without_targets_prompts_take_the_whole_budget():
    simulation = simulate(slo, num_blocks=400, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=900)
    simulation.add([1, 2], max_tokens=40)
    for _ in range(15):
        simulation.step()
    simulation.add([3] * 200, max_tokens=2)
    assert simulation.step().num_tokens == 32


def test_a_target_that_cannot_be_kept_stops_nobody():
    simulation = simulate(
        slo,
        num_blocks=400,
        step_seconds=lambda plan: true_seconds(StepLoad.of(plan)),
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=900,
    )
    for number in range(12):
        simulation.add([number] * 30, max_tokens=10, tpot_target_s=1e-6)
    simulation.run()
    check_answers(simulation)


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, 3),  # steps before it arrives
            st.integers(1, 24),
            st.integers(1, 12),
            st.sampled_from([None, 1.0, 5.0, 20.0]),
        ),
        min_size=1,
        max_size=14,
    ),
    num_blocks=st.integers(12, 40),
)
def test_nobody_goes_before_an_earlier_deadline_but_the_shorter(requests, num_blocks):
    simulation = simulate(slo, num_blocks, max_num_seqs=3, max_num_batched_tokens=12)
    added = []
    for steps, prompt, outputs, target in requests:
        for _ in range(steps):
            simulation.step()
        added.append(simulation.add([prompt] * prompt, outputs, ttft_target_s=target))
    simulation.run()
    check_answers(simulation)
    for urgent in added:
        for other in added:
            now = other.first_scheduled_s - 1
            was_there = urgent.arrival_s <= now < urgent.first_scheduled_s - 1
            can_keep_it = now + urgent.num_prompt / 6 <= deadline(urgent)  # a prompt may get 6 of 12 tokens
            if was_there and can_keep_it and deadline(urgent) < deadline(other):
                assert other.num_prompt < urgent.num_prompt, "a later deadline went first"


def attainment(scheduler, interval):
    """Return the share of requests that have their first token in time, one coming every few steps."""
    draw = random.Random(3)
    simulation = simulate(scheduler, num_blocks=200, max_num_seqs=4, max_num_batched_tokens=16)
    added, firsts = [], {}
    for step in range(400):
        if step % interval == 0:
            target = draw.choice([4.0, 25.0])
            added.append(simulation.add([step % 900] * draw.randint(4, 24), 8, ttft_target_s=target))
        simulation.step()
        for request in simulation.running:
            if request.num_tokens > request.num_prompt:
                firsts.setdefault(request.id, simulation.now_s - request.arrival_s)
    settled = [request for request in added if request.arrival_s < 370]
    return sum(firsts.get(r.id, 1e9) <= r.ttft_target_s for r in settled) / len(settled)


def test_more_requests_are_in_time_than_under_fcfs():
    assert attainment(slo, 4) > 0.95
    for interval in (2, 1):
        assert attainment(slo, interval) > attainment(fcfs, interval) + 0.1


def test_whoever_is_late_has_a_turn():
    simulation = simulate(slo, num_blocks=200, max_num_seqs=1, max_num_batched_tokens=16)
    simulation.add([1] * 4, max_tokens=30, ttft_target_s=100.0)
    simulation.step()
    late = simulation.add([2] * 20, max_tokens=1, ttft_target_s=1.0)
    while late not in simulation.ended:
        simulation.add([3] * 4, max_tokens=2, ttft_target_s=500.0)
        simulation.step()
    assert len(simulation.admissions) <= 2 + LATE_TURN
