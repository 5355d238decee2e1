"""An engine without a model: checks every plan, and that every token is computed from the right KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from conch.api import BuildContext, Request, Row, SamplingParams, Scheduler, StepPlan
from conch.testing.context import VOCAB_SIZE
from conch.testing.plan_checks import check_plan, snapshot
from conch.testing.shadow import ShadowPool, history


def next_token(values: Sequence[int], seed: int) -> int:
    """Return the token that the simulated model gives after a history."""
    return 1 + (values[-1] * 31 + seed) % (VOCAB_SIZE - 1)


def expected(prompt: Sequence[int], count: int, seed: int = 0, salt: str = "") -> list[int]:
    """Return what a request brings, whatever runs beside it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(history(tokens, salt), seed))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class Simulation:
    """Requests, and the steps that a scheduler plans for them.

    Attributes
    ----------
    context
        Holds the KV manager and the prefix cache in force.
    num_drafts
        Guesses proposed after each step, some of them wrong.
    admissions
        Ids in the order of their first admission.
    plans
        Every plan so far.
    ended
        Requests that reached their limit.
    """

    scheduler: Scheduler
    context: BuildContext
    num_drafts: int = 0
    finished: list[int] = field(default_factory=list)
    admissions: list[int] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    _waiting: dict[int, Request] = field(default_factory=dict)
    _running: dict[int, Request] = field(default_factory=dict)
    _tables: dict[int, list[int]] = field(default_factory=dict)
    _last_id: int = 0

    def __post_init__(self) -> None:
        """Begin with an empty pool."""
        self.pool = ShadowPool(self.context.num_blocks, self.context.config.block_size)

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests without KV, those preempted first."""
        return tuple(self._waiting.values())

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold KV, in order of admission."""
        return tuple(self._running.values())

    def add(self, prompt: Sequence[int], max_tokens: int, choices: int = 1, salt: str = "") -> Request:
        """Queue a request; the seeds of its choices are their indices."""
        request = Request(
            id=self._new_id(),
            token_ids=list(prompt),
            num_prompt=len(prompt),
            params=SamplingParams(n=choices, max_tokens=max_tokens),
            seed=0,
            limit=len(prompt) + max_tokens,
            cache_salt=salt,
            pending_forks=tuple(range(1, choices)),
        )
        self._waiting[request.id] = request
        return request

    def cancel(self, request: Request) -> None:
        """End a request early."""
        if self._running.pop(request.id, None) is not None:
            self.finished.append(request.id)
        self._waiting.pop(request.id, None)
        self._tables.pop(request.id, None)
        self.context.kv_manager.release(request.id)
        self.context.prefix_cache.forget(request.id)

    def step(self) -> StepPlan | None:
        """Plan, check, compute and commit one step."""
        before = snapshot(self)
        plan = self.scheduler.plan(self)
        assert snapshot(self) == before, "a scheduler does not write to requests"
        check_plan(plan, self, self.context)
        self.context.kv_manager.check_integrity()
        if plan is None:
            return None
        self.plans.append(plan)
        self._apply(plan)
        self._compute(plan)
        for row in plan.rows:
            self._commit(self._running[row.request_id], row)
        return plan

    def run(self, max_steps: int = 5000) -> None:
        """Step until every request has ended."""
        while self._waiting or self._running:
            assert self.step() is not None, "no plan, and nothing is in flight"
            max_steps -= 1
            assert max_steps > 0, "the scheduler makes no progress"

    def check_idle(self) -> None:
        """Raise AssertionError where a block is held though nobody runs."""
        manager = self.context.kv_manager
        manager.check_integrity()
        assert manager.free_blocks == manager.num_blocks, "blocks are leaked"

    def _apply(self, plan: StepPlan) -> None:
        self.finished.clear()
        for request_id in plan.preempted:
            request = self._running.pop(request_id)
            request.num_computed, request.drafts, request.is_known = 0, (), False
            request.num_preemptions += 1
            self._tables.pop(request_id, None)
            self._waiting = {request_id: request, **self._waiting}
        for admission in plan.admitted:
            is_fork = admission.request_id in self._running
            request = (self._running if is_fork else self._waiting).pop(admission.request_id)
            if request.first_scheduled_s is None:
                request.first_scheduled_s = float(len(self.plans))
                self.admissions.append(request.id)
            request.is_known = True
            self._running[request.id] = request
        for row in plan.rows:
            self._running[row.request_id].num_computed = row.start + row.count

    def _compute(self, plan: StepPlan) -> None:
        """Write the KV of all rows, then check what each row reads."""
        self.pool.move(plan.moves)
        values = {}
        for row in plan.rows:
            request, table = self._running[row.request_id], self._tables.setdefault(row.request_id, [])
            assert row.blocks_from <= len(table), "the row leaves a hole in its block table"
            table[row.blocks_from :] = row.blocks
            assert table == list(self.context.kv_manager.blocks(row.request_id)), (
                "the row tells another table"
            )
            values[row.request_id] = history([*request.token_ids, *row.drafts], request.cache_salt)
            self.pool.write(table, values[row.request_id], row.start, row.start + row.count)
        for row in plan.rows:
            self.pool.check(self._tables[row.request_id], values[row.request_id], row.start + row.count)

    def _commit(self, request: Request, row: Row) -> None:
        if row.samples:
            brought = self._sample(request, row.drafts)
            request.num_computed -= len(row.drafts) + 1 - len(brought)
            request.token_ids += brought
        table = self.context.kv_manager.blocks(request.id)
        self.context.prefix_cache.insert(request, table, request.num_computed)
        if row.samples:
            for choice in request.pending_forks:
                self._fork(request, choice)
            request.pending_forks = ()
            self._draft(request)
            if request.num_tokens == request.limit:
                self.ended.append(request)
                self.cancel(request)

    def _sample(self, request: Request, drafts: tuple[int, ...]) -> list[int]:
        tokens = list(request.token_ids)
        for draft in (*drafts, None):
            tokens.append(next_token(history(tokens, request.cache_salt), request.seed))
            if tokens[-1] != draft:
                break
        return tokens[request.num_tokens :]

    def _draft(self, request: Request) -> None:
        guesses = expected(request.token_ids, self.num_drafts, request.seed, request.cache_salt)
        request.drafts = tuple(guess if guess % 3 else guess + 1 for guess in guesses)

    def _fork(self, parent: Request, choice: int) -> None:
        child = Request(
            id=self._new_id(),
            token_ids=parent.token_ids[: parent.num_prompt],
            num_prompt=parent.num_prompt,
            params=parent.params,
            seed=choice,
            limit=parent.limit,
            cache_salt=parent.cache_salt,
            num_computed=parent.num_prompt - 1,
            first_scheduled_s=parent.first_scheduled_s,
        )
        self.context.kv_manager.fork(parent.id, child.id, child.num_computed)
        self._running[child.id] = child

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id
