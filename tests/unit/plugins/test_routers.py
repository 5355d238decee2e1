"""Routers choose by what they are told."""

from __future__ import annotations

from collections import Counter

from conch.api import ReplicaLoad, RoutedRequest
from conch_plugins.routers.least_loaded import LeastLoadedRouter
from conch_plugins.routers.round_robin import RoundRobinRouter

ANY = RoutedRequest((1,))


def loads(*triples):
    return [ReplicaLoad(engine, *triple) for engine, triple in enumerate(triples)]


def test_least_loaded_weighs_waiting_then_running_then_kv():
    router = LeastLoadedRouter()
    assert router.place(ANY, loads((0, 3, 0.0), (9, 1, 0.9), (9, 2, 0.1))) == 1
    assert router.place(ANY, loads((4, 0, 0.1), (3, 0, 0.9), (5, 0, 0.0))) == 1
    assert router.place(ANY, loads((4, 0, 0.5), (4, 0, 0.4), (4, 0, 0.6))) == 1


def test_least_loaded_goes_round_among_equals():
    router = LeastLoadedRouter()
    placed = [router.place(ANY, loads((1, 0, 0.1), (0, 0, 0.0), (0, 0, 0.0), (0, 0, 0.0))) for _ in range(9)]
    assert Counter(placed) == {1: 3, 2: 3, 3: 3}


def test_a_backlog_is_evened_out():
    router, waiting = LeastLoadedRouter(), [12, 0, 5, 0]
    for _ in range(31):
        waiting[router.place(ANY, loads(*((0, count, 0.0) for count in waiting)))] += 1
    assert waiting == [12, 12, 12, 12]


def test_round_robin_ignores_loads_and_survives_a_lost_replica():
    router = RoundRobinRouter()
    three, two = loads((9, 9, 1.0), (0, 0, 0.0), (5, 5, 0.5)), loads((0, 0, 0.0), (9, 9, 1.0))
    assert [router.place(ANY, three) for _ in range(5)] == [0, 1, 2, 0, 1]
    assert [router.place(ANY, two) for _ in range(3)] == [0, 1, 0]
