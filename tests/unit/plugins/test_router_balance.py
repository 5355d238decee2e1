"""Balance of requests over simulated replicas (F60), and what prefix affinity finds."""

from __future__ import annotations

import pytest

from conch.api import EngineConfig, ReplicaLoad, RoutedRequest
from conch.engine.catalogue import Catalogue
from conch.testing import replica_traces as traces
from conch.testing.replicas import play

BALANCING = ("least_loaded", "prefix_affinity")
COUNTS = (2, 4)


def build(name):
    return Catalogue.load().build("router", name, EngineConfig(model="none"))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", BALANCING)
class TestBalance:
    def test_equal_requests_are_spread_evenly(self, name, count):
        report = play(build(name), traces.equal(), count)
        assert sum(report.placed) == traces.REQUESTS
        assert report.imbalance <= 0.1

    def test_nobody_waits_beside_an_idle_replica_though_every_fourth_is_long(self, name, count):
        report = play(build(name), traces.every_fourth_long(), count)
        assert sum(report.placed) == traces.REQUESTS
        assert report.most_waiting_beside_idle <= 2

    def test_a_burst_after_idling_spreads(self, name, count):
        report = play(build(name), traces.burst_after_idling(), count)
        assert report.imbalance <= 0.1
        assert report.most_waiting_beside_idle <= 2

    def test_placement_is_even_again_after_many_have_left(self, name, count):
        leaving, after = traces.cancelled_together()
        both = play(build(name), [*leaving, *after], count)
        first = play(build(name), leaving, count)
        placed_after = [one - other for one, other in zip(both.placed, first.placed, strict=True)]
        assert sum(placed_after) == len(after)
        assert max(placed_after) - min(placed_after) <= 0.1 * len(after)


@pytest.mark.parametrize("count", COUNTS)
def test_affinity_finds_more_of_shared_prompts_and_leaves_nobody_waiting(count):
    trace = traces.shared_prompts()
    affine, turns = (play(build(name), trace, count) for name in ("prefix_affinity", "round_robin"))
    assert affine.hit_rate > turns.hit_rate
    assert affine.most_waiting_beside_idle <= 2


def test_the_traces_are_hard_for_who_does_not_look():
    """Taking turns sends every long request to the same replica."""
    report = play(build("round_robin"), traces.every_fourth_long(), 4, seats=4)
    assert report.most_waiting_beside_idle > 2


def test_a_replica_that_dies_and_comes_back_takes_its_share_again():
    router, engines = build("least_loaded"), {0: 4, 1: 4}
    del engines[0]
    engines[2] = 0
    for _ in range(8):
        loads = [ReplicaLoad(engine, running, 0, 0.0) for engine, running in engines.items()]
        engines[loads[router.place(RoutedRequest((1,)), loads)].engine] += 1
    assert engines == {1: 6, 2: 6}
