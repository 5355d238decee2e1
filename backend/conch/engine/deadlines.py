"""Who has run out of time, at the cost of those who have."""

from __future__ import annotations

import heapq
import math

from conch.api.request import Request


class Deadlines:
    """A heap of deadlines. Those of requests that ended meanwhile are dropped when their time comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def add(self, request: Request) -> None:
        """Watch a request's deadlines, if it has any."""
        for deadline in (request.deadline_s, request.queue_deadline_s):
            if deadline < math.inf:
                heapq.heappush(self._heap, (deadline, request.id))

    def due(self, now_s: float) -> list[int]:
        """Ids with a deadline at or before `now_s`; each deadline is returned once."""
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            due.append(heapq.heappop(self._heap)[1])
        return due
