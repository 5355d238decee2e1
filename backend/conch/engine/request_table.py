"""The live requests: the one place where they are written."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from conch.api.request import Request
from conch.api.steps import StepPlan


class RequestTable:
    """Requests by state. Implements `conch.api.request.Requests` for schedulers.

    A request waits (no KV), runs (holds KV), or has ended and is gone from here. Two dicts keep the waiting:
    the preempted go before those that never ran.
    """

    def __init__(self) -> None:
        self._preempted: dict[int, Request] = {}
        self._queued: dict[int, Request] = {}
        self._running: dict[int, Request] = {}
        self._running_order: tuple[Request, ...] | None = ()
        self._finished: list[int] = []
        self._arrived: dict[int, Request] = {}
        self._departed: list[int] = []

    @property
    def waiting(self) -> Iterable[Request]:
        """Requests without KV, those preempted first, then in order of arrival."""
        return chain(self._preempted.values(), self._queued.values())

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold KV, in order of admission."""
        if self._running_order is None:
            self._running_order = tuple(self._running.values())
        return self._running_order

    @property
    def in_flight(self) -> Sequence[Request]:
        """None: see `conch.engine.overlap`."""
        return ()

    @property
    def finished(self) -> Sequence[int]:
        """Ids that ended since the last plan."""
        return self._finished

    @property
    def arrived(self) -> Iterable[Request]:
        """Requests that came to wait since the last plan."""
        return self._arrived.values()

    @property
    def departed(self) -> Sequence[int]:
        """Ids that ended while they waited since the last plan."""
        return self._departed

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._preempted) + len(self._queued)

    @property
    def num_running(self) -> int:
        """Requests that hold KV."""
        return len(self._running)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all live requests, running ones first."""
        return chain(self.running, self.waiting)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._running or request_id in self._queued or request_id in self._preempted

    def is_running(self, request_id: int) -> bool:
        """Whether the request holds KV."""
        return request_id in self._running

    def get(self, request_id: int) -> Request | None:
        """Return a live request, or None once it has ended."""
        return (
            self._running.get(request_id) or self._queued.get(request_id) or self._preempted.get(request_id)
        )

    def queue(self, request: Request) -> None:
        """Add a new request at the end of the queue."""
        self._queued[request.id] = request
        self._arrived[request.id] = request

    def start_fork(self, request: Request) -> None:
        """Add a choice that was forked off a running request and holds KV already."""
        self._running[request.id] = request
        self._running_order = None

    def remove(self, request: Request) -> None:
        """End a request. The workers hear of it with the next plan if they knew it."""
        if self._running.pop(request.id, None) is not None:
            self._running_order = None
            self._finished.append(request.id)
        else:
            self._departed.append(request.id)
        self._arrived.pop(request.id, None)
        self._queued.pop(request.id, None)
        self._preempted.pop(request.id, None)

    def apply(self, plan: StepPlan) -> None:
        """Make a plan true: preemptions, admissions, and the tokens that are being computed."""
        self._finished.clear()
        self._arrived.clear()
        self._departed.clear()
        for request_id in plan.preempted:  # each to the head of the queue: the last victim goes first
            request = self._running.pop(request_id)
            request.num_computed = plan.kept.get(request_id, 0)
            request.drafts = ()
            request.is_known = False
            request.num_preemptions += 1
            self._preempted = {request_id: request, **self._preempted}
        for admission in plan.admitted:
            self._admit(admission.request_id, plan.cached.get(admission.request_id, 0))
        if plan.preempted or plan.admitted:
            self._running_order = None
        for row in plan.rows:
            self._running[row.request_id].num_computed = row.start + row.count

    def _admit(self, request_id: int, cached: int) -> None:
        request = self.get(request_id)  # a fork runs already, unknown to the workers
        assert request is not None, "a plan admits live requests only"
        self._queued.pop(request_id, None)
        self._preempted.pop(request_id, None)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = time.monotonic()
            request.num_cached = cached
        request.is_known = True
        request.num_at_admission = request.num_tokens
        self._running[request_id] = request
