"""Every tenant gets its share, whatever the others ask for."""

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
from conch_plugins.schedulers.accounts import Account, Accounts
from conch_plugins.schedulers.lines import follow


class FairLine:
    """Those who wait, in the order of what their tenants have been served. Implements `conch.api.Line`.

    Parameters
    ----------
    input_weight, output_weight
        What a prompt token and a generated one count.
    """

    def __init__(self, input_weight: float, output_weight: float) -> None:
        self._input_weight = input_weight
        self._output_weight = output_weight
        self._accounts = Accounts()
        self._waiting: dict[int, Request] = {}
        self._running: dict[int, Account] = {}

    @property
    def accounts(self) -> Accounts:
        """What each tenant has been served."""
        return self._accounts

    def add(self, request: Request) -> None:
        """Take in a request that arrived or was preempted."""
        if request.id in self._waiting:
            return
        account = self._running.pop(request.id, None)
        self._waiting[request.id] = request
        self._accounts.queue(request)
        if account is not None:
            self._accounts.stop(account)

    def remove(self, request_id: int) -> None:
        """Forget a request that waits."""
        request = self._waiting.pop(request_id, None)
        if request is not None:
            self._accounts.unqueue(request)

    def follow_running(self, requests: Requests) -> None:
        """Take note of who ended, and of choices that were forked off."""
        for request_id in requests.finished:
            account = self._running.pop(request_id, None)
            if account is not None:
                self._accounts.stop(account)
        for request in requests.running:  # counting them would not do: of steps in flight none is among them
            if request.id not in self._running:
                self._running[request.id] = self._accounts.start(request)

    def charge(self, result: StepResult) -> None:
        """Put the tokens of a step on their accounts."""
        for row in result.rows:
            account = self._running.get(row.request_id) if row.token_ids else None
            if account is not None:
                account.served += self._output_weight * len(row.token_ids)

    def first(self) -> Request | None:
        """Return the next of the tenant that has been served the least."""
        account = self._accounts.least_served()
        return None if account is None else account.next()

    def shortest(self) -> Request | None:
        """Return the same: nobody goes past another tenant."""
        return self.first()

    def precedes(self, waiting: Request, running: Request) -> bool:
        """Prompts under way are on their accounts already."""
        return False

    def leave(self, request: Request) -> None:
        """Note an admission; the prompt is put on its account, once."""
        account = self._accounts.start(request)
        if request.first_scheduled_s is None:
            account.served += self._input_weight * request.num_prompt
        account.oldest_next = not account.oldest_next
        self._running[request.id] = account
        self.remove(request.id)

    def give_way(self, waiting: Request) -> Request | None:
        """Nobody."""
        return None

    def most_served(self, candidates: Sequence[Request]) -> list[Request]:
        """Return those of the tenant that is ahead of the others: who goes when the pool runs short."""
        ahead = max((self._running[request.id] for request in candidates), key=lambda one: one.served)
        return [request for request in candidates if self._running[request.id] is ahead]

    def too_far_ahead(self, running: Sequence[Request], most: float) -> list[Request]:
        """Return who runs of tenants that one more step would bring more than `most` past one that waits."""
        least = self._accounts.least_served()
        if least is None:
            return []
        ahead = {
            account.tenant: account.served - least.served
            for account in self._accounts.busy
            if 2 * (account.served - least.served) > most
        }
        if not ahead:
            return []
        mine = [request for request in running if request.tenant in ahead]
        for request in mine:
            ahead[request.tenant] += self._output_weight * (1 + len(request.drafts))
        return [request for request in mine if ahead[request.tenant] > most]


class FairScheduler:
    """Serves the tenant that has been served the least, counting tokens: a virtual token counter for each.

    A prompt token counts `fair_input_weight` at admission, a generated one `fair_output_weight`; what a
    tenant does not ask for is lost to it, as its counter is lifted when it comes back. While two tenants
    both have requests waiting, what they are served differs by at most ``2 * max(wp * L, wq * M)``, where
    ``L`` is the longest prompt and ``M`` the tokens that the KV pool holds, whatever either of them sends
    (Sheng et al., OSDI '24); to compute again after a preemption costs nothing. The bound holds although
    admission is optimistic: a tenant that would exceed it gives way. Where the pool runs short, the tenant
    that has been served the most gives way. Within a tenant the oldest and the shortest take turns.

    Parameters
    ----------
    context
        Gives the limits, the KV manager and the prefix cache.
    """

    def __init__(self, context: BuildContext) -> None:
        config, manager = context.config, context.kv_manager
        self._begin = PlanBuilder.for_context(context)
        self._line = FairLine(config.fair_input_weight, config.fair_output_weight)
        pool_tokens = manager.num_blocks * manager.block_size
        longest = min(context.model.max_model_len, pool_tokens)
        self._most_ahead = max(config.fair_input_weight * longest, config.fair_output_weight * pool_tokens)
        self._nobody = EmptyLine()

    def plan(self, requests: Requests) -> StepPlan | None:
        """Plan one step; see `conch.api.Scheduler`."""
        line, running = self._line, requests.running
        line.follow_running(requests)
        follow(requests, line)
        builder = self._begin(requests)
        for request in line.too_far_ahead(running, self._most_ahead):
            builder.preempt(request)
        runs = [one for one in running if one not in builder.preempted] if builder.has_preempted else running
        num_preempted = len(builder.preempted)
        prompts = builder.pay_decodes(runs, line.most_served)
        is_short = len(builder.preempted) > num_preempted
        PromptTurns(builder, self._nobody if is_short else line).pay(prompts)
        for request in builder.preempted:
            line.add(request)
        return builder.build()

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Charge what was generated."""
        self._line.charge(result)
