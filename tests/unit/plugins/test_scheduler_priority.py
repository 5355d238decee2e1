"""The most urgent first, and nobody starves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from conch_plugins.schedulers.priority import PriorityScheduler
from support.scheduling import check_answers, simulate, steps_to_first_token

AGING_S = 50.0


def full(num_blocks=60, seats=6, budget=24, outputs=60, **settings):
    """Return a simulation whose pool or seats are taken by requests of priority 3, with as many that wait."""
    simulation = simulate(
        PriorityScheduler,
        num_blocks=num_blocks,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        priority_aging_s=AGING_S,
        **settings,
    )
    for number in range(2 * seats):
        simulation.add([number] * 7, max_tokens=outputs, priority=3)
    return simulation


@settings(max_examples=50, deadline=None)
@given(
    num_blocks=st.integers(26, 80),
    seats=st.integers(1, 6),
    steps=st.integers(0, 30),
    prompt=st.integers(1, 80),
)
def test_an_urgent_request_waits_at_most_two_steps_longer_than_in_an_idle_engine(
    num_blocks, seats, steps, prompt
):
    idle = simulate(PriorityScheduler, num_blocks=num_blocks, max_num_seqs=seats, max_num_batched_tokens=24)
    alone = steps_to_first_token(idle, idle.add([99] * prompt, max_tokens=4))
    simulation = full(num_blocks, seats)
    for _ in range(steps):
        simulation.step()
    urgent = simulation.add([99] * prompt, max_tokens=4)
    assert simulation.waiting[1:], "nobody else waits: the engine is not full"
    assert steps_to_first_token(simulation, urgent) <= alone + 2
    simulation.run()
    check_answers(simulation)


def test_only_as_many_give_way_as_must_and_the_last_admitted_first():
    simulation = full(seats=4, num_blocks=200)
    simulation.step()
    running = [request.id for request in simulation.running]
    simulation.add([99] * 3, max_tokens=2)
    assert simulation.step().preempted == (running[-1],)


def test_equals_do_not_send_each_other_away():
    simulation = full(seats=4, num_blocks=200)
    for _ in range(3):
        simulation.step()
    simulation.add([99] * 3, max_tokens=2, priority=3)
    simulation.run()
    assert not any(plan.preempted for plan in simulation.plans)


def test_nobody_is_sent_away_in_vain():
    simulation = full(seats=2, num_blocks=64, outputs=200)
    simulation.add([88] * 150, max_tokens=90, priority=0)
    for _ in range(30):
        simulation.step()
    vast = simulation.add([77] * 200, max_tokens=20, priority=1)
    for _ in range(5):
        assert not simulation.step().preempted
    assert vast in simulation.waiting


@settings(max_examples=25, deadline=None)
@given(
    priority=st.integers(1, 4),
    interval=st.integers(1, 4),
    outputs=st.integers(1, 12),
    seats=st.integers(1, 3),
)
def test_whoever_waits_moves_up_and_is_served(priority, interval, outputs, seats):
    simulation = simulate(
        PriorityScheduler, max_num_seqs=seats, max_num_batched_tokens=24, priority_aging_s=10.0
    )
    humble, count = simulation.add([5] * 6, max_tokens=4, priority=priority), 0
    most = 10 * priority + 4 * outputs * (10 * priority // interval + 2) + 20
    while humble not in simulation.ended:
        if count % interval == 0:
            simulation.add([count % 90] * 3, max_tokens=outputs, priority=0)
        simulation.step()
        count += 1
        assert count <= most, "a request that waits is overtaken for ever"


@settings(max_examples=50, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 20), st.integers(0, 3)),
        min_size=1,
        max_size=14,
    ),
    num_blocks=st.integers(14, 40),
    num_drafts=st.sampled_from([0, 2]),
)
def test_everyone_gets_the_right_tokens(requests, num_blocks, num_drafts):
    simulation = simulate(
        PriorityScheduler, num_blocks, num_drafts, max_num_seqs=4, max_num_batched_tokens=12
    )
    for steps, prompt, outputs, priority in requests:
        for _ in range(steps):
            simulation.step()
        simulation.add([prompt % 7] * prompt, max_tokens=outputs, priority=priority)
    simulation.run()
    assert len(simulation.ended) == len(requests)
    check_answers(simulation)
