"""The replica with the fewest requests."""

from __future__ import annotations

from collections.abc import Sequence

from conch.api import ReplicaLoad, RoutedRequest


class LeastLoadedRouter:
    """Takes the replica with the fewest waiting requests, then the fewest running, then the least KV in use.

    Among equals it goes round: loads are always a little old, and a fixed choice would send a whole burst to
    one replica.
    """

    def __init__(self) -> None:
        self._next = 0

    def place(self, request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> int:
        """Return the index of the least load, the first such from the last choice on."""
        count = len(loads)
        order = [(self._next + offset) % count for offset in range(count)]
        place = min(order, key=lambda index: _weight(loads[index]))
        self._next = (place + 1) % count
        return place


def _weight(load: ReplicaLoad) -> tuple[int, int, float]:
    return load.waiting, load.running, load.kv_usage
