"""First come, first served."""

from __future__ import annotations

from conch.api import BuildContext, EmptyLine, PlanBuilder, PromptTurns, Requests, StepPlan
from conch_plugins.schedulers.lines import RankedLine, follow


class FcfsScheduler:
    """Serves requests in the order of arrival, continuously batched, prompts in chunks.

    A step pays those who owe one token, and shares the rest among prompts: half to the oldest, half to the
    shortest, each what the other leaves. So prompts get their first tokens in the order of arrival, but for
    one that is longer than those behind it: it lets them pass, at half its pace. The first in the queue that
    does not fit the pool or the seats holds back all behind it. Where the KV pool runs short, somebody goes
    back to the queue, and nobody is admitted in that step.

    Parameters
    ----------
    context
        Gives the limits, the KV manager and the prefix cache.
    """

    def __init__(self, context: BuildContext) -> None:
        self._begin = PlanBuilder.for_context(context)
        self._line = RankedLine()
        self._nobody = EmptyLine()

    def plan(self, requests: Requests) -> StepPlan | None:
        """Plan one step; see `conch.api.Scheduler`."""
        follow(requests, self._line)
        builder = self._begin(requests)
        prompts = sorted(builder.pay_decodes(requests.running), key=self._line.rank)
        PromptTurns(builder, self._nobody if builder.has_preempted else self._line).pay(prompts)
        for request in builder.preempted:
            self._line.add(request)
        return builder.build()
