"""Several steps in flight: right to the last token, whatever is shared, preempted or cancelled meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conch.api import SamplingParams
from conch.engine.protocol import AddRequest, CancelRequest
from support.simulated import collect, expected, simulate

SCHEDULERS = ("fcfs", "priority", "fair", "slo", "lpm")


def ask(request_id, prompt, **params):
    return AddRequest(
        request_id=request_id,
        token_ids=tuple(prompt),
        params=SamplingParams(**{"max_tokens": 5, "seed": 0, **params}),
        priority=request_id % 3,
    )


def test_half_of_the_requests_are_in_each_step():
    simulation = simulate(pipeline_parallel_size=2)
    for request_id in range(1, 9):
        simulation.engine.add(ask(request_id, [request_id], max_tokens=40))
    collect(simulation.run())
    sizes = [len(plan.rows) for plan in simulation.worker.plans]
    assert sizes.count(4) > 60, sizes
    simulation.check_idle()


def test_chunks_of_one_prompt_are_in_flight_together():
    simulation = simulate(pipeline_parallel_size=2, max_num_batched_tokens=8)
    prompt = list(range(1, 41))
    simulation.engine.add(ask(1, prompt, max_tokens=3))
    news, counts = [], []
    for _ in range(5):
        news += simulation.engine.step()
        counts.append(simulation.engine.stats().steps)
    assert counts == [2, 3, 4, 5, 5]  # submitted, while one after the other is collected
    outputs, _ = collect(news + simulation.run())
    assert [len(plan.rows) for plan in simulation.worker.plans[:5]] == [1] * 5
    assert outputs[1, 0][0] == expected(prompt, 3)
    simulation.check_idle()


@pytest.mark.parametrize("settings", [{"max_num_seqs": 1}, {}])
def test_a_prompt_that_gives_way_while_its_chunks_are_computed(settings):
    """They are in vain: nothing of them may be found in the cache."""
    simulation = simulate(
        pipeline_parallel_size=2, max_num_batched_tokens=8, scheduler="priority", num_blocks=12, **settings
    )
    long, urgent = list(range(1, 41)), [7] * 30
    simulation.engine.add(ask(2, long))
    news = simulation.engine.step()
    assert simulation.engine.stats().steps == 2  # one of which is in flight
    simulation.engine.add(ask(3, urgent))
    news += simulation.engine.step()
    assert simulation.engine.stats().preemptions == 1
    simulation.engine.add(ask(5, long))
    outputs, failures = collect(news + simulation.run())
    assert not failures
    for request_id, prompt in ((2, long), (3, urgent), (5, long)):
        assert outputs[request_id, 0][0] == expected(prompt, 5)
    simulation.check_idle()


def test_fair_knows_choices_forked_while_others_are_in_flight():
    """As many run that it sees as it knew before, but they are not the same."""
    simulation = simulate(
        num_blocks=12,
        max_num_batched_tokens=8,
        pipeline_parallel_size=2,
        scheduler="fair",
        drafter=lambda tokens, room: tuple(tokens[-2:][:room]),
    )
    asked = [([1] * 9, 2, 2, 1), ([1, 1, 1, 2, *[1] * 16], 3, 1, 2), ([1], 3, 2, 0), ([1], 1, 1, 0)]
    asked += [([1] * 4, 2, 2, 0), ([1, 1], 2, 2, 0)]
    news = []
    for request_id, (prompt, count, choices, steps) in enumerate(asked, 1):
        simulation.engine.add(ask(request_id, prompt, max_tokens=count, n=choices, ignore_eos=True))
        for _ in range(steps):
            news += simulation.engine.step()
    outputs, failures = collect(news + simulation.run())
    assert not failures
    for request_id, (prompt, count, choices, _) in enumerate(asked, 1):
        for choice in range(choices):
            assert outputs[request_id, choice][0] == expected(prompt, count, choice)
    simulation.check_idle()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_tokens_are_those_of_one_step_at_a_time(scheduler, data):
    """With a pool that is short, shared prompts, choices, drafts and cancellations."""
    simulation = simulate(
        num_blocks=data.draw(st.integers(12, 24)),
        max_num_batched_tokens=data.draw(st.sampled_from([8, 32])),
        pipeline_parallel_size=data.draw(st.integers(2, 3)),
        swap_space_bytes=data.draw(st.sampled_from([0, 8])),
        drafter=lambda tokens, room: tuple(tokens[-2:][:room]),
        scheduler=scheduler,
    )
    prompts, news, cancelled = {}, [], set()
    for request_id in range(1, data.draw(st.integers(2, 10)) + 1):
        prompt = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=20))
        count, choices = data.draw(st.integers(1, 16)), data.draw(st.integers(1, 2))
        prompts[request_id] = (prompt, count, choices)
        simulation.engine.add(ask(request_id, prompt, max_tokens=count, n=choices, ignore_eos=True))
        for _ in range(data.draw(st.integers(0, 3))):
            news += simulation.engine.step()
        if data.draw(st.integers(0, 5)) == 0:
            cancelled.add(request_id)
            simulation.engine.cancel(CancelRequest(request_id, ()))
        simulation.parts.kv_manager.check_integrity()
    outputs, failures = collect(news + simulation.run())
    assert not failures
    simulation.check_idle()
    for request_id, (prompt, count, choices) in prompts.items():
        for choice in range(choices) if request_id not in cancelled else ():
            assert outputs[request_id, choice][0] == expected(prompt, count, choice), request_id
