"""What a scheduler sees of the requests while steps are in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from conch.api.request import Request, Requests
from conch.api.steps import StepPlan
from conch.engine.request_table import RequestTable


class Overlap(Protocol):
    """Shows requests to a scheduler, and is told of steps that begin and end."""

    @property
    def requests(self) -> Requests:
        """What the scheduler may plan for."""

    def begin(self, plan: StepPlan) -> None:
        """Note a step that was submitted."""

    def end(self, plan: StepPlan) -> Collection[int]:
        """Note that it was collected; returns whose rows were in vain: they were preempted meanwhile."""


class NoOverlap:
    """One step at a time: when the next one is planned, none is in flight."""

    def __init__(self, table: RequestTable) -> None:
        self.requests: Requests = table

    def begin(self, plan: StepPlan) -> None:
        """Note nothing."""

    def end(self, plan: StepPlan) -> Collection[int]:
        """Nobody is preempted between a plan and its end."""
        return ()


class SteppingAside:
    """Keeps requests whose next token a step in flight samples out of the scheduler's hands.

    Nothing can be planned for them before it is known. The chunks of a prompt follow each other without
    waiting: steps run in order, so a later one finds the KV of those before it, and whoever is given the
    blocks of a request that is preempted writes to them after it. Implements `conch.api.Requests`, too.
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._busy: set[int] = set()
        self._in_vain: deque[set[int]] = deque()

    @property
    def requests(self) -> Requests:
        """Itself."""
        return self

    def begin(self, plan: StepPlan) -> None:
        """Keep out those that it samples for."""
        for in_vain in self._in_vain:
            in_vain.update(plan.preempted)
        self._in_vain.append(set())
        self._busy.update(row.request_id for row in plan.rows if row.samples)

    def end(self, plan: StepPlan) -> Collection[int]:
        """Let them in again; steps end in the order in which they began."""
        self._busy.difference_update(row.request_id for row in plan.rows if row.samples)
        return self._in_vain.popleft()

    @property
    def waiting(self) -> Iterable[Request]:
        """Those of the table."""
        return self._table.waiting

    @property
    def running(self) -> Sequence[Request]:
        """Those that no step in flight samples for."""
        return tuple(request for request in self._table.running if request.id not in self._busy)

    @property
    def in_flight(self) -> Sequence[Request]:
        """The others that run."""
        return tuple(request for request in self._table.running if request.id in self._busy)

    @property
    def finished(self) -> Sequence[int]:
        """Those of the table."""
        return self._table.finished

    @property
    def arrived(self) -> Iterable[Request]:
        """Those of the table."""
        return self._table.arrived

    @property
    def departed(self) -> Sequence[int]:
        """Those of the table."""
        return self._table.departed


def overlap_of(table: RequestTable, depth: int) -> Overlap:
    """Return what suits a depth."""
    return NoOverlap(table) if depth == 1 else SteppingAside(table)
