"""Whoever is more urgent goes first, and may send away who is less so."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence

from conch.api import BuildContext, KVManager, PlanBuilder, PromptTurns, Request, Requests, StepPlan
from conch_plugins.schedulers.lines import RankedLine, Ranking, follow


class PriorityLine:
    """Those who wait, by priority and age. Implements `conch.api.Line`.

    A request of priority ``p`` stands where one of priority 0 would that came ``p * aging_s`` later: so all
    move up at the same pace, and their order never changes while they wait.

    Parameters
    ----------
    aging_s
        Seconds of waiting that count for one level of priority.
    kv_manager
        Knows what a request that gives way would leave.
    clock
        Seconds, on the clock of `Request.arrival_s`.
    """

    def __init__(self, aging_s: float, kv_manager: KVManager, clock: Callable[[], float]) -> None:
        self._aging_s = aging_s
        self._kv = kv_manager
        self._clock = clock
        self._order = Ranking(self.rank)
        self._by_priority: dict[int, RankedLine] = {}
        self._at_admission: dict[int, int] = {}
        self._running: Sequence[Request] = ()
        self._victims: list[tuple[int, int, Request]] | None = None
        self._priority = 0
        self._highest_seen = 0

    def rank(self, request: Request) -> float:
        """Return when a request of priority 0 in its place would have arrived."""
        return request.priority * self._aging_s + request.arrival_s

    def waiting_level(self, request: Request) -> int:
        """Return a priority less the time waited; waiting brings nobody above 0, where clients begin."""
        waited = int((self._clock() - request.arrival_s) / self._aging_s)
        return min(request.priority, max(0, request.priority - waited))

    def running_level(self, request: Request) -> int:
        """Return the level at which a request was admitted: it keeps what it has waited for."""
        return self._at_admission.get(request.id, request.priority)

    def begin(self, requests: Requests) -> None:
        """Begin a plan."""
        for request_id in requests.finished:
            self._at_admission.pop(request_id, None)
        self._running, self._victims = requests.running, None

    def share_within(self, prompts: Sequence[Request]) -> tuple[list[Request], list[Request]]:
        """Split prompts under way, in order: those of the most urgent priority, who share, and the rest."""
        heads = [request for request in (self.first(), *prompts[:1]) if request is not None]
        if heads:
            self._priority = min(heads, key=self.rank).priority
        share = [request for request in prompts if request.priority == self._priority]
        return share, [request for request in prompts if request.priority != self._priority]

    def add(self, request: Request) -> None:
        """Take in a request."""
        self._at_admission.pop(request.id, None)
        self._highest_seen = max(self._highest_seen, request.priority)
        self._order.add(request)
        self._by_priority.setdefault(request.priority, RankedLine()).add(request)

    def remove(self, request_id: int) -> None:
        """Forget a request."""
        request = self._order.get(request_id)
        if request is not None:
            self._order.remove(request_id)
            equals = self._by_priority[request.priority]
            equals.remove(request_id)
            if not len(equals):
                del self._by_priority[request.priority]

    def first(self) -> Request | None:
        """Return whoever stands first, waiting counted."""
        return self._order.first()

    def lowest(self) -> Request | None:
        """Return the oldest of the lowest priority, whoever has waited."""
        return self._by_priority[min(self._by_priority)].first() if self._by_priority else None

    def shortest(self) -> Request | None:
        """Return the shortest of the priority that shares."""
        equals = self._by_priority.get(self._priority)
        return None if equals is None else equals.shortest()

    def precedes(self, waiting: Request, running: Request) -> bool:
        """Compare places."""
        return (self.rank(waiting), waiting.id) < (self.rank(running), running.id)

    def leave(self, request: Request) -> None:
        """Note an admission."""
        self._at_admission[request.id] = self.waiting_level(request)
        self.remove(request.id)

    def give_way(self, waiting: Request) -> Request | None:
        """Return whoever runs at the highest level, of those the last admitted.

        None where it is not both of a higher priority than the one who waits and, its own waiting counted,
        at a higher level; or where all of those together would leave too little.
        """
        if waiting.priority >= self._highest_seen:  # so it is where nobody states a priority
            return None
        if self._victims is None:
            self._victims = [(-self.running_level(one), -i, one) for i, one in enumerate(self._running)]
            heapq.heapify(self._victims)
        if self._victims and self._may_send_away(waiting, self._victims[0][2]) and self._would_do(waiting):
            return heapq.heappop(self._victims)[2]
        return None

    def _may_send_away(self, waiting: Request, running: Request) -> bool:
        is_above = running.priority > waiting.priority
        return is_above and self.running_level(running) > self.waiting_level(waiting)

    def _would_do(self, waiting: Request) -> bool:
        left = self._kv.free_blocks
        for _, _, running in self._victims or ():
            if self._may_send_away(waiting, running):
                left += len(self._kv.blocks(running.id))
        return left * self._kv.block_size > waiting.num_tokens

    def least_urgent(self, candidates: Sequence[Request]) -> list[Request]:
        """Return those of the lowest level: from among them goes who must when the pool runs short."""
        lowest = max(self.running_level(request) for request in candidates)
        return [request for request in candidates if self.running_level(request) == lowest]


class LowestFirst:
    """The same line, when whoever stands first in it does not fit: for those who may send others away.

    One that has moved up by waiting sends nobody of its own priority away. It must not hold back one that
    may.
    """

    def __init__(self, line: PriorityLine) -> None:
        self._line = line
        self.leave = line.leave
        self.give_way = line.give_way

    def first(self) -> Request | None:
        """Return the oldest of the lowest priority."""
        return self._line.lowest()

    def shortest(self) -> Request | None:
        """Nobody goes past."""
        return None

    def precedes(self, waiting: Request, running: Request) -> bool:
        """Not asked: all who run are paid."""
        return False


class PriorityScheduler:
    """Serves the most urgent first; the lowest priorities give way to it, and move up as they wait.

    A request of lower `priority` is admitted before all of a higher one, but for those that have waited: each
    `priority_aging_s` counts for one level, so one of priority ``p`` that has waited ``p`` times that long
    stands with those of priority 0, before all of them that came since. Where a request does not fit, others
    of a higher priority, at a higher level, are preempted for it, the highest first and the last admitted of
    those; decodes are paid before prompts. So a request of priority 0 in an engine full of others gets its
    first token after as many steps as in an idle one, give or take what the decodes take of the budget; and
    nobody starves, since a request at level 0 is sent away for nobody, and passed only by those for whom
    others are sent away. Within a priority, prompts share as under `fcfs`.

    Parameters
    ----------
    context
        Gives the limits, the KV manager and the prefix cache.
    clock
        Seconds, on the clock of `Request.arrival_s`.
    """

    def __init__(self, context: BuildContext, clock: Callable[[], float] = time.monotonic) -> None:
        self._begin = PlanBuilder.for_context(context)
        self._line = PriorityLine(context.config.priority_aging_s, context.kv_manager, clock)
        self._lowest_first = LowestFirst(self._line)

    def plan(self, requests: Requests) -> StepPlan | None:
        """Plan one step; see `conch.api.Scheduler`."""
        line = self._line
        follow(requests, line)
        line.begin(requests)
        builder = self._begin(requests)
        prompts = sorted(builder.pay_decodes(requests.running, line.least_urgent), key=line.rank)
        PromptTurns(builder, line).pay(*line.share_within(prompts))
        PromptTurns(builder, self._lowest_first).pay([])
        for request in builder.preempted:
            line.add(request)
        return builder.build()
