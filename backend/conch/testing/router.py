"""What every router promises."""

from __future__ import annotations

from collections import Counter

from conch.api import ReplicaLoad, Router

IDLE = ReplicaLoad(running=0, waiting=0, kv_usage=0.0)


class RouterContract:
    """Inherit, implement `build`, and let pytest collect the subclass."""

    def build(self) -> Router:
        """Build the router under test."""
        raise NotImplementedError

    def test_is_a_router(self) -> None:
        """It has the method of the seam."""
        assert isinstance(self.build(), Router)

    def test_places_on_a_replica_that_exists(self) -> None:
        """Also when replicas come and go between two requests."""
        router = self.build()
        for count in (1, 4, 2, 8, 1, 3):
            for number in range(20):
                loads = [ReplicaLoad(number % 3, replica % 2, replica / 8) for replica in range(count)]
                assert 0 <= router.place([number, 1, 2], loads) < count

    def test_spreads_over_replicas_that_look_alike(self) -> None:
        """Loads are always a little old: a burst that sees equal loads is spread evenly."""
        for count in (2, 3, 4):
            router = self.build()
            placed = Counter(router.place([number] * 20, [IDLE] * count) for number in range(200))
            assert max(placed.values()) - min(placed[replica] for replica in range(count)) <= 20
