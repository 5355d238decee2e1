"""First come, first served: who is paid, who waits, who is sent back."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from conch.testing import Simulation, make_context
from conch.testing.simulation import expected
from conch_plugins.schedulers.fcfs import FcfsScheduler


def simulate(num_blocks=64, num_drafts=0, **settings):
    context = make_context(num_blocks=num_blocks, **settings)
    return Simulation(FcfsScheduler(context), context, num_drafts)


def counts(plan):
    return {row.request_id: row.count for row in plan.rows}


def test_decodes_are_paid_first_and_prompts_share_what_is_left():
    simulation = simulate(max_num_batched_tokens=10)
    simulation.add([1, 2], max_tokens=20)
    simulation.step()
    simulation.add(range(25), max_tokens=5)
    simulation.add(range(50, 57), max_tokens=5)
    assert counts(simulation.step()) == {1: 1, 2: 5, 3: 4}
    assert counts(simulation.step()) == {1: 1, 2: 6, 3: 3}
    assert counts(simulation.step()) == {1: 1, 2: 8, 3: 1}
    assert counts(simulation.step()) == {1: 1, 2: 6, 3: 1}


def test_drafts_leave_a_token_for_everyone_who_runs():
    simulation = simulate(num_drafts=6, max_num_batched_tokens=12, max_num_seqs=8)
    for number in range(8):
        simulation.add([number], max_tokens=12)
    simulation.step()
    plan = simulation.step()
    assert len(plan.rows) == 8
    assert sum(len(row.drafts) for row in plan.rows) == 4
    simulation.run()


def test_drafts_are_dropped_before_anyone_is_preempted():
    simulation = simulate(num_blocks=4, num_drafts=8, max_num_seqs=2)
    simulation.add([1] * 5, max_tokens=11)
    simulation.add([2] * 5, max_tokens=2)
    simulation.run()
    assert simulation.plans[1].rows[0].drafts == ()
    assert any(row.drafts for plan in simulation.plans for row in plan.rows)
    assert not any(plan.preempted for plan in simulation.plans)


def test_the_last_admitted_gives_way_and_nobody_is_admitted_meanwhile():
    simulation = simulate(num_blocks=12, max_num_seqs=4)
    requests = [simulation.add([number, number], max_tokens=40) for number in range(4)]
    while not any(plan.preempted for plan in simulation.plans):
        simulation.step()
    assert simulation.plans[-1].preempted == (4,)
    simulation.run()
    preempting = [plan for plan in simulation.plans if plan.preempted]
    assert len(preempting) >= 2
    assert not any(plan.admitted for plan in preempting)
    assert requests[0].num_preemptions == 0
    for request in simulation.ended:
        assert request.token_ids[2:] == expected(request.token_ids[:2], 40)


def test_the_head_of_the_queue_holds_back_those_behind_it():
    simulation = simulate(num_blocks=10, max_num_batched_tokens=64)
    simulation.add(range(20), max_tokens=10)
    simulation.add(range(100, 130), max_tokens=4)
    simulation.add([1], max_tokens=1)
    assert counts(simulation.step()) == {1: 20}
    simulation.run()
    assert simulation.admissions == [1, 2, 3]


def test_an_admission_leaves_room_for_the_next_token_of_those_who_run():
    simulation = simulate(num_blocks=3)
    simulation.add([1, 2, 3], max_tokens=5)
    simulation.step()
    simulation.add(range(10, 17), max_tokens=2)
    assert simulation.context.kv_manager.free_blocks == 2
    assert counts(simulation.step()) == {1: 1}
    simulation.run()
    assert not any(plan.preempted for plan in simulation.plans)
    assert [request.id for request in simulation.ended] == [1, 2]


def test_a_cached_prefix_lets_a_prompt_in_that_is_larger_than_what_is_free():
    simulation = simulate(num_blocks=10, max_num_batched_tokens=64)
    simulation.add(range(24), max_tokens=8)
    simulation.step()
    simulation.add(range(28), max_tokens=2)
    plan = simulation.step()
    assert plan.cached == {2: 24}
    assert counts(plan) == {1: 1, 2: 4}
    simulation.run()
    simulation.check_idle()


CASES = {
    "num_blocks": st.integers(8, 30),
    "max_num_seqs": st.integers(1, 6),
    "budget": st.integers(6, 50),
    "chunked": st.booleans(),
    "caching": st.booleans(),
    "num_drafts": st.sampled_from([0, 0, 2, 5]),
    "arrivals": st.lists(
        st.tuples(
            st.integers(0, 4),  # steps before it arrives
            st.integers(1, 16),  # prompt tokens
            st.integers(1, 16),  # output tokens
            st.integers(0, 3),  # its prompt is one of four families that share a prefix
            st.integers(1, 2),  # choices
        ),
        min_size=1,
        max_size=12,
    ),
}


@settings(max_examples=150, deadline=None)
@given(**CASES)
def test_nobody_is_overtaken_but_by_the_shorter_whatever_comes(
    num_blocks, max_num_seqs, budget, chunked, caching, num_drafts, arrivals
):
    simulation = simulate(
        num_blocks=num_blocks,
        num_drafts=num_drafts,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(budget, max_num_seqs),
        enable_chunked_prefill=chunked,
        enable_prefix_caching=caching,
    )
    added = []
    for steps, num_prompt, num_output, family, choices in arrivals:
        for _ in range(steps):
            simulation.step()
        prompt = random.Random(family).choices(range(5), k=num_prompt)
        added.append(simulation.add(prompt, num_output, min(choices, max_num_seqs)))
    simulation.run()
    simulation.check_idle()
    for overtaken, older in enumerate(added):
        for younger in added[overtaken + 1 :]:
            assert younger.first_scheduled_s >= older.first_scheduled_s or (
                younger.num_prompt < older.num_prompt
            ), "a prompt was overtaken by one that is not shorter"
    assert len(simulation.ended) == sum(request.params.n for request in added)
    for request in simulation.ended:
        prompt, output = request.token_ids[: request.num_prompt], request.token_ids[request.num_prompt :]
        assert output == expected(prompt, request.params.max_tokens, request.seed)
