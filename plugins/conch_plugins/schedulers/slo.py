"""Whoever must be first to be in time goes first, and prompts take what running decodes can spare."""

from __future__ import annotations

from collections.abc import Sequence

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

LEAST_SHARE = 16
"""At least one part in so many of the budget is for prompts, so that they get on whatever is asked for."""

_LESSONS = 8
"""Steps before the model is believed."""


def deadline(request: Request) -> float:
    """Return when a request's first token is wanted."""
    target = request.ttft_target_s
    return request.arrival_s + (UNSTATED_TTFT_S if target is None else target)


class SloScheduler:
    """Gives each step as many prompt tokens as running decodes can spare, to the earliest deadline first.

    A model of how long a step takes is fitted to the steps while they run. The prompts of a step get the
    tokens with which it is expected to take no longer than the strictest `tpot_target_s` of those who decode
    in it, in the spirit of Sarathi-Serve, but at least a sixteenth of `max_num_batched_tokens`. So a decode
    keeps its target as far as the model tells the truth and that sixteenth has room. Prompts and those who
    wait are in the order of ``arrival + ttft_target_s`` (10 s where there is no target) and share as under
    `fcfs`; so every request is served before all that come `ttft_target_s` after it, and nobody starves.

    Parameters
    ----------
    context
        Gives the limits, the KV manager and the prefix cache.
    """

    def __init__(self, context: BuildContext) -> None:
        self._begin = PlanBuilder.for_context(context)
        self._line = RankedLine(deadline)
        self._nobody = EmptyLine()
        self._model = StepTimeModel()
        self._least = -(-context.config.max_num_batched_tokens // LEAST_SHARE)
        self._most = context.config.max_num_batched_tokens
        self._splits = context.config.enable_chunked_prefill

    def plan(self, requests: Requests) -> StepPlan | None:
        """Plan one step; see `conch.api.Scheduler`."""
        follow(requests, self._line)
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

    def _spare_tokens(self, running: Sequence[Request], prompts: Sequence[Request]) -> int:
        """Return how many prompt tokens the decodes of a step can spare."""
        decodes = [request for request in running if request.owed == 1]
        targets = [request.tpot_target_s for request in decodes if request.tpot_target_s is not None]
        per_token = self._model.seconds_per_prefill_token
        if not targets or self._model.num_observed < _LESSONS or per_token <= 0.0:
            return self._most
        context = sum(request.num_tokens for request in decodes)
        context += sum(request.num_computed for request in prompts[:1])
        without = self._model.expect(StepLoad(0, len(decodes), context))
        return max(self._least, int((min(targets) - without) / per_token))
