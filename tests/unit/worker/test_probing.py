from __future__ import annotations

import itertools

import pytest

from conch.worker.probing import Probing

STEP_S = 0.01


def probed(cost, steps=5000):
    """Return the steps that probe; `cost` says what a probe takes, given the steps since the last."""
    probing, found = Probing(), [0]
    for step in range(1, steps):
        probing.work(STEP_S)
        if probing.is_due():
            assert probing.is_under_way and probing.is_idle
            probing.spend(cost(step - found[-1]))
            found.append(step)
    return found[1:]


def test_probes_are_frequent_at_first_and_then_regular():
    found = probed(lambda gap: 0.0)
    assert found[0] <= 5 and len([step for step in found if step < 100]) >= 4
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert max(gaps) == gaps[-1] <= 64


@pytest.mark.parametrize("cost_s", [0.3 * STEP_S, 5 * STEP_S, 100 * STEP_S])
def test_probes_take_a_small_share_of_the_time(cost_s):
    found = probed(lambda gap: cost_s)
    assert found and cost_s * (len(found) - 1) < 0.02 * 5000 * STEP_S, "all but the first are foreseen"


def test_what_has_to_catch_up_for_long_is_not_probed_for_ever():
    """A draft model computes all that it has missed: each probe costs in proportion to the gap before it."""
    found = probed(lambda gap: 0.1 * STEP_S * gap)
    assert 1 <= len(found) <= 3


def test_what_probes_cost_is_remembered_where_drafts_pay_now_and_then():
    """Phases in which drafts pay come and go; each time the draft model is far behind."""
    probing, probes, worked_s = Probing(), 0, 0.0
    for _ in range(50):
        for _ in range(30):
            probing.work(STEP_S)
            worked_s += STEP_S
            if probing.is_due():
                probing.spend(10 * STEP_S)
                probes += 1
        probing.rest()
        assert not probing.is_idle and not probing.is_under_way
    assert probes > 1
    assert (probes - 1) * 10 * STEP_S < 0.02 * worked_s, "all but the first are foreseen"
