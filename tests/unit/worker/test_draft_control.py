"""Drafting pays, or is cut back."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from conch.api import SpeculativeConfig
from conch.worker.acceptance import Acceptance
from conch.worker.draft_control import BackOff, Schedule
from conch.worker.step_times import StepTimes

K = 4


def controlled(accept, times, count, steps=400, round_s=0.0):
    """Run a control over a simulated engine; returns drafted tokens of each step and the total of seconds.

    Parameters
    ----------
    accept
        For request i: how many of its drafts are right.
    times
        Seconds of a step by tokens.
    """
    control = BackOff(SpeculativeConfig(method="ngram", num_speculative_tokens=K))
    ids = list(range(count))
    drafts, history, tokens, seconds = [0] * count, [], 0, 0.0
    for _ in range(steps):
        size = count + sum(drafts)
        for index in ids:
            right = min(accept[index], drafts[index])
            tokens += 1 + right
            if drafts[index]:
                control.learn_row(index, drafts[index], right)
        control.learn_step(size, times(size))
        seconds += times(size)
        rooms = control.rooms(ids, [K] * count)
        control.learn_drafting(sum(map(bool, rooms)), max(rooms), round_s * max(rooms))
        seconds += round_s * max(rooms)
        drafts = control.trim(ids, rooms)
        history.append(drafts)
    return history, tokens / seconds


def linear(size):
    return 1 + 0.5 * size


def flat(size):
    return 10 + 0.01 * size


def test_all_is_drafted_where_all_is_right_and_steps_cost_the_same():
    history, speed = controlled([K] * 4, flat, 4)
    assert history[-1] == [K] * 4
    assert speed > 4.5 * 4 / flat(4)


@pytest.mark.parametrize("count", [1, 4, 16])
def test_what_is_never_right_is_given_up_and_costs_next_to_nothing(count):
    history, speed = controlled([0] * count, linear, count)
    late = [sum(drafts) for drafts in history[100:]]
    assert 0 < sum(late) < 0.1 * len(late) * count, "a probe now and then, no more"
    assert speed > 0.95 * count / linear(count)


def test_drafting_that_takes_too_long_is_given_up():
    history, speed = controlled([1] * 4, flat, 4, round_s=20.0)
    assert sum(map(sum, history[100:])) < 100
    assert speed > 0.8 * 4 / flat(4)


def test_drafts_go_to_the_requests_that_use_them():
    history, _ = controlled([K, 0, 0, 0], linear, 4)
    late = np.array(history[100:]).mean(axis=0)
    assert late[0] > K - 0.5 and late[1:].max() < 0.5


def test_it_is_noticed_when_drafts_become_right():
    control = BackOff(SpeculativeConfig(method="ngram", num_speculative_tokens=K))
    drafts = [0]
    for step in range(600):
        right = 0 if step < 200 else K
        if drafts[0]:
            control.learn_row(1, drafts[0], min(drafts[0], right))
        control.learn_step(1 + drafts[0], linear(1 + drafts[0]))
        drafts = control.trim([1], control.rooms([1], [K]))
        if step == 199:
            assert drafts == [0]
    assert drafts == [K]


def test_it_is_noticed_when_one_of_many_becomes_predictable():
    history, _ = controlled([K, 0, 0], linear, 3, steps=100)
    assert history[-1][1:] == [0, 0]
    control = BackOff(SpeculativeConfig(method="ngram", num_speculative_tokens=K))
    ids, drafts = [0, 1, 2], [0, 0, 0]
    for step in range(2000):
        right = [K, K if step > 200 else 0, 0]
        for index in ids:
            if drafts[index]:
                control.learn_row(index, drafts[index], min(drafts[index], right[index]))
        control.learn_step(3 + sum(drafts), linear(3 + sum(drafts)))
        drafts = control.trim(ids, control.rooms(ids, [K] * 3))
    assert drafts == [K, K, 0]


STANDING_S, ROUND_S = 0.2, 1.0


def measured(size):
    """Return milliseconds of a step as two cores take them: flat, then in proportion."""
    return np.interp(size, [1, 4, 8, 16, 32, 64], [9.4, 9.8, 10.2, 11.5, 16.0, 26.0])


def on_a_busy_machine(chance, count, steps=500):
    """Return tokens a second over those without drafts, each of which is right by chance; times swing."""
    control = BackOff(SpeculativeConfig(method="ngram", num_speculative_tokens=3))
    rng, ids, drafts = random.Random(16), list(range(count)), [0] * count
    tokens, seconds, without_s, pace = 0, 0.0, 0.0, 1.0
    for _ in range(steps):
        pace = min(max(pace * math.exp(rng.gauss(0, 0.03)), 0.7), 1.5)
        size = count + sum(drafts)
        took_s = measured(size) * pace * math.exp(rng.gauss(0, 0.1))
        for index in ids:
            right = 0
            while right < drafts[index] and rng.random() < chance:
                right += 1
            tokens += 1 + right
            if drafts[index]:
                control.learn_row(index, drafts[index], right)
        control.learn_step(size, took_s)
        rooms = control.rooms(ids, [3] * count)
        drafting_s = (STANDING_S + ROUND_S * max(rooms)) * pace * math.exp(rng.gauss(0, 0.1))
        control.learn_drafting(sum(map(bool, rooms)), max(rooms), drafting_s)
        drafts = control.trim(ids, rooms)
        seconds += took_s + drafting_s
        without_s += measured(count) * pace
    return tokens / seconds * without_s / (count * steps)


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.45, 0.6])
def test_a_large_batch_loses_next_to_nothing_on_a_busy_machine(chance):
    """What is measured swings by far more than drafts would gain or lose here."""
    assert on_a_busy_machine(chance, 16) > 0.95


def test_one_stream_gains_on_a_busy_machine():
    assert on_a_busy_machine(0.5, 1) > 1.2


def test_drafting_that_was_held_up_once_is_not_given_up_for_good():
    control = BackOff(SpeculativeConfig(method="ngram", num_speculative_tokens=K))
    drafts = [0]
    for step in range(6000):
        if drafts[0]:
            control.learn_row(1, drafts[0], drafts[0])
        control.learn_step(1 + drafts[0], flat(1 + drafts[0]))
        rooms = control.rooms([1], [K])
        control.learn_drafting(sum(map(bool, rooms)), max(rooms), max(rooms) * (30.0 if step < 10 else 0.5))
        drafts = control.trim([1], rooms)
    assert drafts == [K]


def test_the_schedule_bounds_everyone():
    settings = SpeculativeConfig(
        method="ngram", num_speculative_tokens=K, num_speculative_tokens_per_batch_size=((2, 3, 1), (4, 9, 0))
    )
    for control in (Schedule(settings), BackOff(settings)):
        control.learn_step(64, 1.0)
        assert control.rooms([1], [9]) == [K]
        assert control.rooms([1, 2], [9, 0]) == [1, 0]
        assert control.rooms([1, 2, 3, 4], [9] * 4) == [0] * 4


def test_chances_follow_what_was_accepted():
    acceptance = Acceptance(3)
    for _ in range(100):
        acceptance.learn(1, 3, 3)
        acceptance.learn(2, 3, 1)
    good, poor = acceptance.chances([1, 2])
    assert good[-1] > 0.8
    assert poor[0] > 2 * poor[1] and list(poor) == sorted(poor, reverse=True)
    acceptance.forget([1, 2])
    good, poor = acceptance.chances([1, 2])
    assert list(good) == list(poor)


def test_step_times_are_learnt_and_interpolated():
    times = StepTimes()
    assert times.predict(np.array([1])) is None
    for _ in range(50):
        for size in (1, 9, 33):
            times.learn(size, linear(size))
    found = times.predict(np.array([1, 5, 9, 20, 33, 50]))
    assert found[:5] == pytest.approx([linear(size) for size in (1, 5, 9, 20, 33)], rel=0.02)
    assert found[5] == pytest.approx(linear(50), rel=0.05), "beyond the largest the line goes on"
    assert times.largest == pytest.approx(33)


def test_a_step_that_was_held_up_does_not_make_larger_ones_look_cheap():
    times = StepTimes()
    for size in (16, 20, 32):
        times.learn(size, linear(size))
    times.learn(18, 100.0)
    assert list(times.predict(np.array([18, 32]))) == [linear(20), linear(32)]


def test_sizes_are_tried_little_by_little():
    """A step that costs ten times as much is not stumbled into."""

    def steep(size):
        return 10 if size <= 16 else 10 + 5 * (size - 16)

    history, speed = controlled([K] * 16, steep, 16, steps=300)
    assert max(map(sum, history)) <= 8
    assert speed > 0.9 * 16 / steep(16)
