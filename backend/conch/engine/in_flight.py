"""Steps that were submitted and not yet collected."""

from __future__ import annotations

from collections import deque

from conch.api.steps import StepPlan


class InFlight:
    """A queue of plans with their tickets, at most `depth` long."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._queue: deque[tuple[StepPlan, int]] = deque()

    @property
    def has_room(self) -> bool:
        """Whether one more step may be submitted."""
        return len(self._queue) < self._depth

    @property
    def is_empty(self) -> bool:
        """Whether nothing is being computed."""
        return not self._queue

    def add(self, plan: StepPlan, ticket: int) -> None:
        """Note a submitted step."""
        self._queue.append((plan, ticket))

    def pop_oldest(self) -> tuple[StepPlan, int]:
        """Take the step that is collected next."""
        return self._queue.popleft()
