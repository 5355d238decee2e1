"""What every router promises."""

from __future__ import annotations

from collections import Counter

from conch.api import EngineConfig, ReplicaLoad, RoutedRequest, Router


class RouterContract:
    """Inherit, implement `build`, and let pytest collect the subclass."""

    def build(self, config: EngineConfig) -> Router:
        """Build the router under test."""
        raise NotImplementedError

    def test_is_a_router(self) -> None:
        """It has the method of the seam."""
        assert isinstance(self.build(EngineConfig(model="none")), Router)

    def test_places_on_a_replica_that_exists(self) -> None:
        """Also when replicas come and go between two requests."""
        router = self.build(EngineConfig(model="none"))
        for count in (1, 4, 2, 8, 1, 3):
            for number in range(20):
                loads = [
                    ReplicaLoad(replica, number % 3, replica % 2, replica / 8) for replica in range(count)
                ]
                assert 0 <= router.place(RoutedRequest([number, 1, 2]), loads) < count

    def test_spreads_over_replicas_that_look_alike(self) -> None:
        """Loads are always a little old: a burst that sees equal loads is spread evenly."""
        for count in (2, 3, 4):
            router = self.build(EngineConfig(model="none"))
            idle = [ReplicaLoad(replica, 0, 0, 0.0) for replica in range(count)]
            placed = Counter(router.place(RoutedRequest([number] * 20), idle) for number in range(200))
            assert max(placed.values()) - min(placed[replica] for replica in range(count)) <= 20

    def test_a_prompt_that_everybody_sends_does_not_swamp_one_replica(self) -> None:
        """Whatever a router knows of prompts: nobody is sent requests to queue up beside an idle replica."""
        for count in (2, 4):
            router, waiting = self.build(EngineConfig(model="none")), [0] * count
            for _ in range(40 * count):
                loads = [ReplicaLoad(replica, 8, waiting[replica], 0.5) for replica in range(count)]
                waiting[router.place(RoutedRequest(range(1000)), loads)] += 1
            assert max(waiting) - min(waiting) <= 4, "a replica's queue grows while others have none"
