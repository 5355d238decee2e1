"""Who has run out of time, at the cost of those who have."""

from __future__ import annotations

import heapq
import math

from conch.api.request import Request

_SLACK = 64


class Deadlines:
    """A heap of deadlines. Those of requests that have ended are dropped before they are half of it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._ended: set[int] = set()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch a request's deadlines, if it has any."""
        for deadline in (request.deadline_s, request.queue_deadline_s):
            if deadline < math.inf:
                heapq.heappush(self._heap, (deadline, request.id))

    def forget(self, request: Request) -> None:
        """Note that a request has ended."""
        if min(request.deadline_s, request.queue_deadline_s) == math.inf:
            return
        self._ended.add(request.id)
        if 2 * len(self._ended) > len(self._heap) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[1] not in self._ended]
            heapq.heapify(self._heap)
            self._ended.clear()

    def due(self, now_s: float) -> list[int]:
        """Ids with a deadline at or before `now_s`; each deadline is returned once."""
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            due.append(heapq.heappop(self._heap)[1])
        return due
