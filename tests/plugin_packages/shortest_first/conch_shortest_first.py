"""A scheduler that admits the shortest prompt first."""

from conch.api import PlanBuilder, hookimpl


class ShortestFirst:
    def __init__(self, context):
        self.begin = PlanBuilder.for_context(context)

    def plan(self, requests):
        builder = self.begin(requests)
        builder.pay_all(requests.running)
        for request in sorted(requests.waiting, key=lambda request: request.owed):
            if builder.has_preempted or not builder.admit(request):
                break
        return builder.build()


@hookimpl
def conch_schedulers():
    return {"shortest_first": ShortestFirst}
