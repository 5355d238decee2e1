"""Whoever must be first to be in time goes first, and prompts take what running decodes can spare."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from conch.api import (
    BuildContext,
    EmptyLine,
    PlanBuilder,
    PromptTurns,
    Request,
    Requests,
    StepPlan,
    StepResult,
)
from conch_plugins.schedulers.lines import RankedLine, follow
from conch_plugins.schedulers.step_time import StepLoad, StepTimeModel

UNSTATED_TTFT_S = 10.0
"""Stands for the target of a request that has none."""

LEAST_SHARE = 64
"""At least one part in so many of the budget is for prompts, so that they get on whatever is asked for."""

_SMOOTHING = 0.1

_LESSONS = 8
"""Steps before the model is believed."""


LATE_TURN = 4
"""One admission in so many is for whoever has been late the longest, while others may still be in time."""


def deadline(request: Request) -> float:
    """Return when a request's first token is wanted."""
    target = UNSTATED_TTFT_S if request.ttft_target_s is None else request.ttft_target_s
    return request.arrival_s + target


def _due(request: Request) -> float:
    """Return its place: one preempted behind its first token has no deadline to miss, and goes first."""
    return request.arrival_s if _has_begun(request) else deadline(request)


def _has_begun(request: Request) -> bool:
    return request.num_tokens > request.num_prompt


class DeadlineLine:
    """Those who wait: by deadline while they can keep it, then by age. Implements `conch.api.Line`.

    To serve those first who are late already would make the others late, too; so they get one turn in four.
    """

    def __init__(self) -> None:
        self._timely = RankedLine(_due)
        self._late = RankedLine()
        self._turn = 0

    def rank(self, request: Request) -> tuple[float, int]:
        """Return where one who runs stands."""
        return self._timely.rank(request)

    def expire(self, now_s: float, seconds_per_token: float) -> None:
        """Move those who can no longer keep their deadline, given what a prompt takes; each moves once."""
        while (request := self._timely.first()) is not None and not _has_begun(request):
            if now_s + request.num_tokens * seconds_per_token <= deadline(request):
                return
            self._timely.remove(request.id)
            self._late.add(request)

    def add(self, request: Request) -> None:
        """Take in a request."""
        if request.id not in self._late:
            self._timely.add(request)

    def remove(self, request_id: int) -> None:
        """Forget a request."""
        self._timely.remove(request_id)
        self._late.remove(request_id)

    def first(self) -> Request | None:
        """Return the earliest deadline; in its turn, or when there is none, whoever is late the longest."""
        lines = (self._late, self._timely) if self._turn == 0 else (self._timely, self._late)
        return lines[0].first() or lines[1].first()

    def shortest(self) -> Request | None:
        """Return the shortest of those who may be in time, or else of all."""
        return self._timely.shortest() or self._late.shortest()

    def precedes(self, waiting: Request, running: Request) -> bool:
        """Compare deadlines; whoever is late comes behind those who run."""
        return waiting.id not in self._late and self._timely.precedes(waiting, running)

    def leave(self, request: Request) -> None:
        """Note an admission."""
        self._turn = (self._turn + 1) % LATE_TURN
        self.remove(request.id)

    def give_way(self, waiting: Request) -> Request | None:
        """Nobody."""
        return None


class SloScheduler:
    """Gives each step as many prompt tokens as running decodes can spare, to the earliest deadline first.

    A model of how long a step takes is fitted to the steps while they run. The prompts of a step get the
    tokens with which it is expected to take no longer than the strictest `tpot_target_s` of those who decode
    in it, in the spirit of Sarathi-Serve, but at least 1/64 of `max_num_batched_tokens`. So a decode keeps
    its target as far as the model tells the truth and that share has room. Those who wait are in the order of
    ``arrival + ttft_target_s`` (10 s where there is no target). Whoever has missed that comes
    behind those who may still keep theirs, but for one admission in four, which is for whoever has been late
    the longest: so nobody starves. Prompts share as under `fcfs`.

    Parameters
    ----------
    context
        Gives the limits, the KV manager and the prefix cache.
    clock
        Seconds, on the clock of `Request.arrival_s`.
    """

    def __init__(self, context: BuildContext, clock: Callable[[], float] = time.monotonic) -> None:
        self._begin = PlanBuilder.for_context(context)
        self._clock = clock
        self._line = DeadlineLine()
        self._nobody = EmptyLine()
        self._model = StepTimeModel()
        self._least = -(-context.config.max_num_batched_tokens // LEAST_SHARE)
        self._most = context.config.max_num_batched_tokens
        self._share = -(-self._most // 2)
        self._step_s = 0.0
        self._splits = context.config.enable_chunked_prefill

    def plan(self, requests: Requests) -> StepPlan | None:
        """Plan one step; see `conch.api.Scheduler`."""
        follow(requests, self._line)
        self._line.expire(self._clock(), self._step_s / self._share)
        builder = self._begin(requests)
        prompts = sorted(builder.pay_decodes(requests.running), key=self._line.rank)
        if self._splits:
            builder.tokens_left = min(builder.tokens_left, self._spare_tokens(requests.running, prompts))
        PromptTurns(builder, self._nobody if builder.has_preempted else self._line).pay(prompts)
        for request in builder.preempted:
            self._line.add(request)
        return builder.build()

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Learn how long a step takes."""
        self._model.learn(StepLoad.of(plan), seconds)
        self._step_s += _SMOOTHING * (seconds - self._step_s)

    def _spare_tokens(self, running: Sequence[Request], prompts: Sequence[Request]) -> int:
        """Return how many prompt tokens the decodes of a step can spare."""
        decodes = [request for request in running if request.owed == 1]
        targets = [request.tpot_target_s for request in decodes if request.tpot_target_s is not None]
        deepest = max((request.num_computed for request in prompts), default=0)
        per_token = self._model.seconds_per_prefill_token(deepest)
        if not targets or self._model.num_observed < _LESSONS or per_token <= 0.0:
            return self._most
        context = sum(request.num_tokens for request in decodes)
        context += sum(request.num_computed for request in prompts[:1])
        without = self._model.expect(StepLoad(0, len(decodes), context))
        spare_s = min(targets) - without
        halfway = deepest + max(0, int(spare_s / per_token)) // 2
        return max(self._least, int(spare_s / self._model.seconds_per_prefill_token(halfway)))
