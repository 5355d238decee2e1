"""One rank, in the engine's own process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from conch.api import Arena, ConchError, StepPlan, StepResult, Worker


class SingleWorker:
    """Runs every step in the caller's thread.

    A step is done when it is collected, not when it is submitted: with one step in flight nothing is gained
    by starting sooner, and an error then rises where its result was expected.

    Parameters
    ----------
    worker_factory
        Builds the worker; called once, here.
    """

    depth = 1

    def __init__(self, worker_factory: Callable[[], Worker]) -> None:
        self._worker: Worker | None = worker_factory()
        self._num_blocks = self._worker.num_blocks
        self._num_slots = {arena: self._worker.num_slots(arena) for arena in Arena}
        self._submitted: deque[tuple[int, StepPlan]] = deque()
        self._last_ticket = 0

    @property
    def num_blocks(self) -> int:
        """KV blocks in the worker's pool."""
        return self._num_blocks

    def num_slots(self, arena: Arena) -> int:
        """Blocks that another arena of the worker holds."""
        return self._num_slots[arena]

    def submit(self, plan: StepPlan) -> int:
        """Take a step; returns its ticket."""
        if self._worker is None:
            raise ConchError("the worker is closed")
        self._last_ticket += 1
        self._submitted.append((self._last_ticket, plan))
        return self._last_ticket

    def collect(self, ticket: int) -> StepResult:
        """Do the oldest step. What the worker raises is raised here."""
        if self._worker is None:
            raise ConchError("the worker is closed")
        oldest, plan = self._submitted.popleft()
        assert oldest == ticket, f"ticket {ticket} collected before ticket {oldest}"
        return self._worker.execute(plan)

    def close(self) -> None:
        """Close the worker; safe to repeat."""
        worker, self._worker = self._worker, None
        self._submitted.clear()
        if worker is not None:
            worker.close()
