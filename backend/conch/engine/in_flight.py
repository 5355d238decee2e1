"""Steps that were submitted and not yet collected."""

from __future__ import annotations

import time
from collections import deque

from conch.api.steps import StepPlan


class InFlight:
    """A queue of plans with their tickets, at most `depth` long."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._queue: deque[tuple[StepPlan, int]] = deque()
        self._began: deque[float] = deque()
        self._last_end_s = 0.0

    @property
    def has_room(self) -> bool:
        """Whether one more step may be submitted."""
        return len(self._queue) < self._depth

    @property
    def is_empty(self) -> bool:
        """Whether nothing is being computed."""
        return not self._queue

    def add(self, plan: StepPlan, ticket: int, began_s: float) -> None:
        """Note a submitted step, and when its planning began."""
        self._queue.append((plan, ticket))
        self._began.append(began_s)

    def pop_oldest(self) -> tuple[StepPlan, int]:
        """Take the step that is collected next."""
        return self._queue.popleft()

    def lap(self) -> float:
        """Seconds that the step just collected has added to the life of all requests: called once for each.

        From the beginning of its planning, or from the end of the step before where that was later.
        """
        now = time.monotonic()
        began_s = max(self._began.popleft(), self._last_end_s)
        self._last_end_s = now
        return now - began_s
