"""Each replica in turn."""

from __future__ import annotations

from collections.abc import Sequence

from conch.api import ReplicaLoad, RoutedRequest


class RoundRobinRouter:
    """Takes the replicas in turn, whatever their load."""

    def __init__(self) -> None:
        self._next = 0

    def place(self, request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> int:
        """Return the next index."""
        place = self._next % len(loads)
        self._next = place + 1
        return place
