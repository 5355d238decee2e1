"""Whoever has the longest cached prefix goes first."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from conch.api import (
    BuildContext,
    EmptyLine,
    PlanBuilder,
    PrefixCache,
    PromptTurns,
    Request,
    Requests,
    StepPlan,
)
from conch_plugins.schedulers.lines import Ranking, age_rank, follow

WINDOW = 32
"""Of those who wait, the oldest that are compared."""

PATIENCE = 32
"""Admissions that one of them lets pass before it goes next."""

_LOOKS_A_STEP = 2


@dataclass(slots=True, eq=False)
class Candidate:
    """A request of the window: when it entered, and what the prefix cache had of it when last asked."""

    request: Request
    entered: int
    matched: int = 0


class MatchLine:
    """Those who wait, by cached prefix. Implements `conch.api.Line`.

    Only a window of the oldest is compared, and what the cache said is remembered: each step asks again for
    two of them, in turn. So a plan costs the same however many wait, and however long their prompts are.

    Parameters
    ----------
    prefix_cache
        Asked what it has.
    """

    def __init__(self, prefix_cache: PrefixCache) -> None:
        self._cache = prefix_cache
        self._queue = Ranking(age_rank)
        self._window: dict[int, Candidate] = {}
        self._looks: deque[Candidate] = deque()
        self._admissions = 0

    def add(self, request: Request) -> None:
        """Take in a request."""
        if request.id not in self._window:
            self._queue.add(request)

    def remove(self, request_id: int) -> None:
        """Forget a request."""
        self._queue.remove(request_id)
        self._window.pop(request_id, None)

    def refresh(self) -> None:
        """Fill the window, and ask the cache again for some of it."""
        for _ in range(min(_LOOKS_A_STEP, len(self._looks))):
            candidate = self._looks.popleft()
            if self._window.get(candidate.request.id) is candidate:
                self._look(candidate)
        while len(self._window) < WINDOW and (request := self._queue.first()) is not None:
            self._queue.remove(request.id)
            self._window[request.id] = candidate = Candidate(request, self._admissions)
            self._look(candidate)

    def first(self) -> Request | None:
        """Return the oldest of those who have let enough pass, else whoever has the longest cached prefix."""
        overdue = self._admissions - PATIENCE
        late = [one.request for one in self._window.values() if one.entered <= overdue]
        if late:
            return min(late, key=age_rank)
        best = max(self._window.values(), key=lambda one: (one.matched, -one.request.id), default=None)
        return None if best is None else best.request

    def shortest(self) -> Request | None:
        """Return whoever has the fewest tokens left behind its cached prefix."""
        best = min(self._window.values(), key=_left_to_compute, default=None)
        return None if best is None else best.request

    def precedes(self, waiting: Request, running: Request) -> bool:
        """Prompts under way go first."""
        return False

    def leave(self, request: Request) -> None:
        """Note an admission; another enters the window with the next step."""
        self._admissions += 1
        self.remove(request.id)

    def give_way(self, waiting: Request) -> Request | None:
        """Nobody."""
        return None

    def _look(self, candidate: Candidate) -> None:
        candidate.matched = self._cache.match(candidate.request).num_tokens
        self._looks.append(candidate)


def _left_to_compute(candidate: Candidate) -> tuple[int, int]:
    return candidate.request.num_tokens - candidate.matched, candidate.request.id


class LpmScheduler:
    """Serves whoever has the longest cached prefix first, so that what is cached is used while it is there.

    The 32 oldest of those who wait are compared; of equal ones the oldest goes, and the shortest may go past
    as under `fcfs`. Nobody starves: a request is overtaken by at most 64 that came later.

    Parameters
    ----------
    context
        Gives the limits, the KV manager and the prefix cache.
    """

    def __init__(self, context: BuildContext) -> None:
        self._begin = PlanBuilder.for_context(context)
        self._line = MatchLine(context.prefix_cache)
        self._nobody = EmptyLine()

    def plan(self, requests: Requests) -> StepPlan | None:
        """Plan one step; see `conch.api.Scheduler`."""
        line = self._line
        follow(requests, line)
        line.refresh()
        builder = self._begin(requests)
        prompts = builder.pay_decodes(requests.running)
        PromptTurns(builder, self._nobody if builder.has_preempted else line).pay(prompts)
        for request in builder.preempted:
            line.add(request)
        return builder.build()
