"""How prompts share a step: a long one never blocks the short ones behind it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol

from conch.api.planning import PlanBuilder
from conch.api.request import Request


class Line(Protocol):
    """Those who wait, in the order of a policy. The scheduler is its only writer."""

    def first(self) -> Request | None:
        """Whose turn it is; None when nobody waits."""

    def shortest(self) -> Request | None:
        """Who may go past the others because it is done soonest; None when nobody waits."""

    def precedes(self, waiting: Request, running: Request) -> bool:
        """Whether one who waits goes before one who runs and whose prompt is under way."""

    def leave(self, request: Request) -> None:
        """Note that a request has been admitted."""

    def give_way(self, waiting: Request) -> Request | None:
        """Return who is to be preempted for one who waits and does not fit; None for nobody."""


class EmptyLine:
    """Nobody waits, or nobody of those who wait may run yet."""

    def first(self) -> Request | None:
        """Nobody."""
        return None

    def shortest(self) -> Request | None:
        """Nobody."""
        return None

    def precedes(self, waiting: Request, running: Request) -> bool:
        """Not asked."""
        return False

    def leave(self, request: Request) -> None:
        """Not asked."""

    def give_way(self, waiting: Request) -> Request | None:
        """Nobody."""
        return None


class PromptTurns:
    """Shares what decodes leave of a step among the prompts under way and those who wait.

    Half of it goes to the first in the policy's order, the other half to the shortest prompt; what one half
    does not need is the other's. So a prompt of `s` tokens with `t` tokens of others before it that are no
    longer than it waits for at most ``2 (s + t) / budget`` steps and one more, whatever longer ones there
    are; and none is slowed to less than half its pace by those that came later, once its turn has come.
    Seats and blocks are given in order: nobody goes past one who waits for them, or takes those that the
    next in order needs.

    Parameters
    ----------
    builder
        The plan, with decodes paid.
    line
        Those who wait.
    """

    def __init__(self, builder: PlanBuilder, line: Line) -> None:
        self._builder = builder
        self._line = line
        self._is_open = True

    def pay(self, prompts: Sequence[Request], behind: Sequence[Request] = ()) -> None:
        """Pay prompts under way and admit.

        Parameters
        ----------
        prompts
            Prompts under way that share, in the policy's order.
        behind
            Prompts under way that get what those leave, in the policy's order.
        """
        rest = list(prompts)
        first = self._pay_first(rest, self._builder.prompt_share)
        self._pay_shortest(first, rest)
        for request in behind:
            self._admit_before(request)
            self._pay(request, None)
        self._admit_before(None)

    def _pay_first(self, rest: list[Request], most: int) -> Request | None:
        waiting = self._line.first()
        goes_first = waiting is not None and (not rest or self._line.precedes(waiting, rest[0]))
        if waiting is not None and goes_first and self._admit(waiting, most):
            return waiting
        if not rest:
            return None
        first = rest.pop(0)
        is_alone = not rest and (waiting is None or not self._is_open)
        self._pay(first, None if is_alone else most)
        return first

    def _pay_shortest(self, first: Request | None, rest: Sequence[Request]) -> None:
        prompts = [*rest] if first is None else [first, *rest]  # of equals the first goes on
        shortest = [(request.num_tokens, index) for index, request in enumerate(prompts)]
        heapq.heapify(shortest)
        while self._builder.tokens_left > 0:
            waiting = self._next_to_admit() if self._is_open else None
            if shortest and (waiting is None or shortest[0][0] <= waiting.num_tokens):
                request = prompts[heapq.heappop(shortest)[1]]
                if request is first:
                    self._builder.top_up(request)
                else:
                    self._pay(request, None)
            elif waiting is not None:
                self._admit(waiting, None)
            else:
                return

    def _next_to_admit(self) -> Request | None:
        """Return the shortest, but for seats and blocks that the next in order needs: those wait for it."""
        first, shortest = self._line.first(), self._line.shortest()
        if first is None or shortest is None or first is shortest:
            return shortest
        return shortest if self._builder.has_room_for(first, shortest) else first

    def _pay(self, request: Request, most: int | None) -> None:
        before = len(self._builder.preempted)
        self._builder.pay_or_preempt(request, most)
        self._is_open = self._is_open and len(self._builder.preempted) == before

    def _admit_before(self, running: Request | None) -> None:
        """Admit in order while there is room, up to one who runs."""
        while self._is_open and self._builder.tokens_left > 0:
            waiting = self._line.first()
            if waiting is None or not (running is None or self._line.precedes(waiting, running)):
                return
            self._admit(waiting, None)

    def _admit(self, request: Request, most: int | None) -> bool:
        while not (admitted := self._builder.admit(request, most)):
            lacks_budget = self._builder.tokens_left <= 0 and self._builder.has_room_for(request)
            victim = None if lacks_budget else self._line.give_way(request)
            if victim is None:
                break
            if victim not in self._builder.preempted:
                self._builder.preempt(victim)
        self._is_open = admitted
        if admitted:
            self._line.leave(request)
        return admitted
