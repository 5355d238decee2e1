"""First come, first served."""

from __future__ import annotations

from conch.api import BuildContext, PlanBuilder, Requests, StepPlan


class FcfsScheduler:
    """Serves requests in the order of arrival, continuously batched, prompts in chunks.

    A step pays those who owe one token, then chunks of the prompts under way, then admits. The first in the
    queue that does not fit holds back all behind it. Where the KV pool runs short, whoever was admitted last
    goes back to the queue, and nobody is admitted in that step.

    Parameters
    ----------
    context
        Gives the limits, the KV manager and the prefix cache.
    """

    def __init__(self, context: BuildContext) -> None:
        self._begin = PlanBuilder.for_context(context)

    def plan(self, requests: Requests) -> StepPlan | None:
        """Plan one step; see `conch.api.Scheduler`."""
        builder = self._begin(requests)
        builder.pay_all(requests.running)
        if not builder.has_preempted:
            for request in requests.waiting:
                if not builder.admit(request):
                    break
        return builder.build()
