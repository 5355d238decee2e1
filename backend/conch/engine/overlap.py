"""What a scheduler sees of the requests while steps are in flight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

    def end(self, plan: StepPlan) -> None:
        """Note that it was collected."""


class NoOverlap:
    """One step at a time: when the next one is planned, none is in flight."""

    def __init__(self, table: RequestTable) -> None:
        self.requests: Requests = table

    def begin(self, plan: StepPlan) -> None:
        """Note nothing."""

    def end(self, plan: StepPlan) -> None:
        """Note nothing."""


class SteppingAside:
    """Keeps requests that a step in flight computes out of the scheduler's hands.

    So nobody is preempted while its KV is being written, and what has yet to be committed is of requests
    that stay where they are. Implements `conch.api.Requests`, too.
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._busy: set[int] = set()

    @property
    def requests(self) -> Requests:
        """Itself."""
        return self

    def begin(self, plan: StepPlan) -> None:
        """Keep its requests out."""
        self._busy.update(row.request_id for row in plan.rows)

    def end(self, plan: StepPlan) -> None:
        """Let them in again."""
        self._busy.difference_update(row.request_id for row in plan.rows)

    @property
    def waiting(self) -> Iterable[Request]:
        """Those of the table."""
        return self._table.waiting

    @property
    def running(self) -> Sequence[Request]:
        """Those that no step in flight computes."""
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
