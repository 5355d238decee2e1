"""The loop over a simulated model: right to the last token, whatever is shared, preempted or cancelled."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conch.api import ErrorCode, FinishReason, SamplingParams
from conch.engine.protocol import AddRequest, CancelRequest
from support.simulated import POISON, collect, expected, simulate


def ask(request_id, prompt, **params):
    extra = {key: params.pop(key) for key in ("timeout_s", "cache_salt", "priority") if key in params}
    return AddRequest(
        request_id=request_id,
        token_ids=tuple(prompt),
        params=SamplingParams(**{"max_tokens": 5, "seed": 0, **params}),
        **extra,
    )


def serve(simulation, *messages):
    for message in messages:
        simulation.engine.add(message)
    outputs, failures = collect(simulation.run())
    simulation.check_idle()
    return outputs, failures


def test_requests_join_and_leave_at_any_step():
    simulation = simulate()
    news = []
    for request_id in range(1, 6):
        simulation.engine.add(ask(request_id, range(1, 3 * request_id), max_tokens=2 * request_id))
        news += simulation.engine.step()
    outputs, _ = collect(news + simulation.run())
    for request_id in range(1, 6):
        want = expected(range(1, 3 * request_id), 2 * request_id)
        assert outputs[request_id, 0] == (want, FinishReason.LENGTH)
    assert max(len(plan.rows) for plan in simulation.worker.plans) > 1


def test_a_long_prompt_is_computed_in_chunks_beside_decodes():
    simulation = simulate(max_num_batched_tokens=8)
    outputs, _ = serve(simulation, ask(1, [5, 6], max_tokens=20), ask(2, range(1, 60)))
    assert outputs[1, 0][0] == expected([5, 6], 20)
    assert outputs[2, 0][0] == expected(range(1, 60), 5)
    chunks = [row for plan in simulation.worker.plans for row in plan.rows if row.request_id == 2]
    assert len([row for row in chunks if not row.samples]) >= 7
    assert all(plan.num_tokens <= 8 for plan in simulation.worker.plans)


def test_choices_share_the_prompt_and_differ_by_seed():
    simulation = simulate()
    prompt = range(1, 15)
    outputs, _ = serve(simulation, ask(1, prompt, n=3, seed=7, max_tokens=6))
    for choice in range(3):
        assert outputs[1, choice] == (expected(prompt, 6, seed=7 + choice), FinishReason.LENGTH)
    computed = sum(plan.num_tokens for plan in simulation.worker.plans)
    assert computed == 14 + 5 + 2 * (1 + 5), "the prompt is computed once; each fork repeats one token"
    assert any(plan.moves for plan in simulation.worker.plans), "no block was copied on write"


def test_a_choice_can_end_alone():
    simulation = simulate()
    simulation.engine.add(ask(1, [3, 4, 5], n=2, max_tokens=9))
    news = simulation.engine.step() + simulation.engine.step()
    simulation.engine.cancel(CancelRequest(1, (1,)))
    outputs, _ = collect(news + simulation.run())
    assert outputs[1, 0] == (expected([3, 4, 5], 9), FinishReason.LENGTH)
    assert outputs[1, 1][1] is FinishReason.CANCELLED
    assert len(outputs[1, 1][0]) < 9
    simulation.check_idle()


def test_preemption_keeps_what_was_generated():
    simulation = simulate(num_blocks=12, prefix_cache="none")
    messages = [ask(i, range(i, i + 6), max_tokens=30) for i in range(1, 7)]
    outputs, _ = serve(simulation, *messages)
    assert simulation.engine.stats().preemptions > 0
    for i in range(1, 7):
        assert outputs[i, 0] == (expected(range(i, i + 6), 30), FinishReason.LENGTH)


def test_prefix_hits_skip_work_and_change_nothing():
    simulation = simulate()
    prompt = list(range(1, 25))
    first, _ = serve(simulation, ask(1, prompt))
    before = sum(plan.num_tokens for plan in simulation.worker.plans)
    again, _ = serve(simulation, ask(2, prompt))
    assert again[2, 0] == first[1, 0]
    stats = simulation.engine.stats()
    assert stats.prefix_hits == 20, "all full blocks but the one that holds the last token"
    assert sum(plan.num_tokens for plan in simulation.worker.plans) - before == 4 + 4


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 16])
def test_a_fully_cached_prompt_still_computes_its_last_token(length):
    simulation = simulate()
    prompt = list(range(1, 1 + length))
    for request_id in range(1, 4):
        outputs, _ = serve(simulation, ask(request_id, prompt))
        assert outputs[request_id, 0][0] == expected(prompt, 5)
    assert simulation.engine.stats().prefix_hits <= 2 * (length - 1)


def test_salts_do_not_share():
    simulation = simulate()
    serve(simulation, ask(1, range(1, 25), cache_salt="a"))
    serve(simulation, ask(2, range(1, 25), cache_salt="b"))
    assert simulation.engine.stats().prefix_hits == 0


def test_what_never_fits_is_refused_and_harms_nobody():
    simulation = simulate(num_blocks=12)
    messages = [ask(1, range(1, 101)), *(ask(i, [i]) for i in range(2, 7))]
    outputs, failures = serve(simulation, *messages)
    assert failures.keys() == {1}
    assert failures[1].code is ErrorCode.INVALID_ARGUMENT
    assert "100 tokens" in failures[1].message and "48" in failures[1].message
    assert all(outputs[i, 0][0] == expected([i], 5) for i in range(2, 7))


def test_growth_past_the_pool_ends_with_length():
    simulation = simulate(num_blocks=12)
    outputs, _ = serve(simulation, ask(1, range(1, 26), max_tokens=500))
    assert outputs[1, 0] == (expected(range(1, 26), 48 - 25), FinishReason.LENGTH)
    assert simulation.engine.stats().preemptions == 0


@pytest.mark.parametrize("length", [61, 62, 63])
def test_the_context_is_a_hard_stop(length):
    simulation = simulate(max_model_len=64)
    outputs, _ = serve(simulation, ask(1, range(1, 1 + length), max_tokens=1000))
    assert len(outputs[1, 0][0]) == 64 - length


@pytest.mark.parametrize("length", [64, 65, 640])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(length):
    _, failures = serve(simulate(max_model_len=64), ask(1, range(1, 1 + length)))
    assert f"{length} tokens" in failures[1].message and "64 tokens" in failures[1].message


@pytest.mark.parametrize("prompt", [[], [-1], [997], [1, 2**31]])
def test_bad_prompts_are_refused(prompt):
    outputs, failures = serve(simulate(), ask(1, prompt), ask(2, [1]))
    assert failures[1].code is ErrorCode.INVALID_ARGUMENT
    assert outputs[2, 0][0] == expected([1], 5)


def test_more_choices_than_seats_are_refused():
    _, failures = serve(simulate(), ask(1, [1], n=9))
    assert "max_num_seqs (8)" in failures[1].message


def test_the_queue_has_a_cap():
    simulation = simulate(max_num_seqs=1, max_queue_size=4)
    simulation.engine.add(ask(100, [1], max_tokens=50))
    simulation.engine.step()
    outputs, failures = serve(simulation, *(ask(i, [i]) for i in range(1, 9)))
    assert failures.keys() == {5, 6, 7, 8}
    assert {failure.code for failure in failures.values()} == {ErrorCode.UNAVAILABLE}
    assert all(outputs[i, 0][0] == expected([i], 5) for i in range(1, 5))


def test_waiting_has_a_time_limit_and_running_does_not_mind():
    simulation = simulate(max_num_seqs=1, queue_timeout_s=0.01)
    simulation.engine.add(ask(1, [1], max_tokens=100))
    news = simulation.engine.step()
    simulation.engine.add(ask(2, [2]))
    time.sleep(0.02)
    news += simulation.engine.step()
    outputs, failures = collect(news)
    assert failures[2].code is ErrorCode.TIMEOUT and "0.01" in failures[2].message
    outputs, failures = collect(news + simulation.run())
    assert outputs[1, 0] == (expected([1], 100), FinishReason.LENGTH)


def test_a_timeout_bounds_running_requests_too():
    simulation = simulate()
    simulation.engine.add(ask(1, [1], max_tokens=100, timeout_s=0.0))
    simulation.engine.add(ask(2, [2]))
    outputs, failures = collect(simulation.run())
    assert failures[1].code is ErrorCode.TIMEOUT
    assert outputs[2, 0][0] == expected([2], 5)
    simulation.check_idle()


def test_cancelling_frees_everything_wherever_the_request_is():
    simulation = simulate(max_num_seqs=2, max_num_batched_tokens=8)
    simulation.engine.add(ask(1, [1], max_tokens=100))
    simulation.engine.add(ask(2, range(1, 100)))
    simulation.engine.add(ask(3, [3], n=2))
    news = simulation.engine.step() + simulation.engine.step()
    for request_id in (1, 2, 3, 99):
        simulation.engine.cancel(CancelRequest(request_id))
    outputs, failures = collect(news + simulation.run())
    assert not failures
    assert {key: reason for key, (_, reason) in outputs.items()} == dict.fromkeys(
        [(1, 0), (2, 0), (3, 0), (3, 1)], FinishReason.CANCELLED
    )
    simulation.check_idle()


def test_a_row_that_cannot_be_computed_fails_alone():
    simulation = simulate()
    outputs, failures = serve(simulation, ask(1, [POISON, 2]), ask(2, [2]), ask(3, [2, POISON], n=2))
    assert failures.keys() == {1, 3}
    assert failures[1].code is ErrorCode.INTERNAL
    assert outputs[2, 0][0] == expected([2], 5)


def test_the_prefix_of_a_failed_request_is_not_shared():
    simulation = simulate(max_num_batched_tokens=8)
    prompt = list(range(1, 20))
    _, failures = serve(simulation, ask(1, [*prompt, POISON]))
    assert failures.keys() == {1}
    outputs, _ = serve(simulation, ask(2, prompt))
    assert outputs[2, 0][0] == expected(prompt, 5)
    assert simulation.engine.stats().prefix_hits == 0


@pytest.mark.parametrize("right", [True, False])
def test_drafts_change_the_number_of_steps_and_nothing_else(right):
    def drafter(tokens, room):
        guess = expected(tokens, room)
        return guess if right else tuple(token % 900 + 1 for token in guess)

    simulation = simulate(drafter=drafter)
    outputs, _ = serve(simulation, ask(1, [1, 2, 3], max_tokens=21), ask(2, [4], max_tokens=13))
    assert outputs[1, 0] == (expected([1, 2, 3], 21), FinishReason.LENGTH)
    assert outputs[2, 0] == (expected([4], 13), FinishReason.LENGTH)
    stats = simulation.engine.stats()
    assert stats.drafts_proposed > 0
    assert (stats.drafts_accepted > 0) is right
    assert (stats.steps < 10) is right


@given(
    data=st.data(),
    num_blocks=st.integers(6, 40),
    budget=st.integers(4, 40),
    seats=st.integers(1, 4),
    cache=st.sampled_from(["none", "hash"]),
)
@settings(max_examples=60, deadline=None)
def test_any_traffic_is_served_right_and_leaves_nothing_behind(data, num_blocks, budget, seats, cache):
    simulation = simulate(
        num_blocks=num_blocks, max_num_batched_tokens=budget, max_num_seqs=seats, prefix_cache=cache
    )
    pool = num_blocks * 4
    asked, cancelled, news = {}, set(), []
    for request_id in range(1, data.draw(st.integers(2, 12), "requests") + 1):
        stem = data.draw(st.integers(0, 2), "stem")
        length = data.draw(st.integers(1, min(pool - 1, 60)), "prompt")
        n = data.draw(st.integers(1, seats), "n")
        message = ask(
            request_id,
            [stem + 1, *range(1, length)],
            n=n,
            max_tokens=data.draw(st.integers(1, 25), "max_tokens"),
        )
        asked[request_id] = message
        simulation.engine.add(message)
        for _ in range(data.draw(st.integers(0, 3), "steps")):
            news += simulation.engine.step()
        if data.draw(st.integers(0, 5), "cancels") == 0:
            victim = data.draw(st.sampled_from(sorted(asked)), "victim")
            simulation.engine.cancel(CancelRequest(victim))
            cancelled.add(victim)
    outputs, failures = collect(news + simulation.run())
    simulation.check_idle()
    assert not failures
    for request_id, message in asked.items():
        room = min(message.params.max_tokens, pool - len(message.token_ids))
        for choice in range(message.params.n):
            tokens, reason = outputs[request_id, choice]
            want = expected(message.token_ids, room, choice)
            assert tokens == want[: len(tokens)]
            assert reason is FinishReason.LENGTH or request_id in cancelled
            assert len(tokens) == room or reason is FinishReason.CANCELLED


def test_the_preempted_come_back_in_the_order_in_which_they_were_admitted():
    simulation = simulate(num_blocks=8, prefix_cache="none", max_num_batched_tokens=64)
    for request_id in range(1, 6):
        simulation.engine.add(ask(request_id, [request_id] * 3, max_tokens=20))
    simulation.run()
    simulation.check_idle()
    plans = simulation.worker.plans
    victims = [request_id for plan in plans for request_id in plan.preempted]
    assert any(len(plan.preempted) > 1 for plan in plans)
    assert victims
    for plan in plans:
        returned = [one.request_id for one in plan.admitted if one.request_id in victims]
        assert returned == sorted(returned)
    ends = [request_id for plan in plans for request_id in plan.finished]
    assert ends == sorted(ends)
