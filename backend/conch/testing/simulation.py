"""An engine without a model: checks every plan, and that every token is computed from the right KV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from conch.api import (
    NO_BLOCK,
    BuildContext,
    Request,
    Row,
    RowResult,
    SamplingParams,
    Scheduler,
    StepObserver,
    StepPlan,
    StepResult,
)
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
    step_seconds
        How long a step takes.
    now_s
        The time, from 0; requests arrive at this time.
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
    step_seconds: Callable[[StepPlan], float] = lambda plan: 1.0
    now_s: float = 0.0
    departed: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    admissions: list[int] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    _waiting: dict[int, Request] = field(default_factory=dict)
    _running: dict[int, Request] = field(default_factory=dict)
    _arrived: dict[int, Request] = field(default_factory=dict)
    _tables: dict[int, list[int]] = field(default_factory=dict)
    _last_id: int = 0

    def __post_init__(self) -> None:
        """Begin with an empty pool."""
        self.pool = ShadowPool(self.context.num_blocks, self.context.config.block_size)
        self._reach = self.context.model.attention.reach

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests without KV, those preempted first."""
        return tuple(self._waiting.values())

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold KV, in order of admission."""
        return tuple(self._running.values())

    @property
    def in_flight(self) -> Sequence[Request]:
        """None: a plan is carried out at once."""
        return ()

    @property
    def arrived(self) -> Iterable[Request]:
        """Requests that came to wait since the last plan."""
        return self._arrived.values()

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        choices: int = 1,
        salt: str = "",
        **attributes: Any,  # noqa: ANN401 - each has its own type
    ) -> Request:
        """Queue a request; the seeds of its choices are their indices, `attributes` those of `Request`."""
        request = Request(
            id=self._new_id(),
            token_ids=list(prompt),
            num_prompt=len(prompt),
            params=SamplingParams(n=choices, max_tokens=max_tokens),
            seed=0,
            limit=len(prompt) + max_tokens,
            cache_salt=salt,
            arrival_s=self.now_s,
            pending_forks=tuple(range(1, choices)),
            **attributes,
        )
        self._waiting[request.id] = self._arrived[request.id] = request
        return request

    def cancel(self, request: Request) -> None:
        """End a request early."""
        if self._running.pop(request.id, None) is not None:
            self.finished.append(request.id)
        else:
            self.departed.append(request.id)
        self._arrived.pop(request.id, None)
        self._waiting.pop(request.id, None)
        self._tables.pop(request.id, None)
        self.context.kv_manager.release(request.id)
        self.context.prefix_cache.forget(request.id)
        self.context.parking.drop(request.id)

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
        failed = self._compute(plan)
        result = StepResult(tuple(self._result(row) for row in plan.rows))
        seconds = self.step_seconds(plan)
        self.now_s += seconds
        if isinstance(self.scheduler, StepObserver):
            self.scheduler.observe(plan, result, seconds)
        for row, brought in zip(plan.rows, result.rows, strict=True):
            self._commit(self._running[row.request_id], row, brought.token_ids)
        self.context.prefix_cache.end_step(plan.moves, failed)
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
        assert self.context.parking.num_used == 0, "somebody who ended has KV parked"

    def _apply(self, plan: StepPlan) -> None:
        self.finished.clear()
        self.departed.clear()
        self._arrived.clear()
        for request_id in plan.preempted:
            request = self._running.pop(request_id)
            request.num_computed = plan.kept.get(request_id, 0)
            request.drafts, request.is_known = (), False
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
            request.num_at_admission = request.num_tokens
            self._running[request.id] = request
        for row in plan.rows:
            self._running[row.request_id].num_computed = row.start + row.count

    def _compute(self, plan: StepPlan) -> tuple[int, ...]:
        """Write the KV of all rows, then check what each row reads; returns which moves have failed."""
        failed = self.pool.move(plan.moves)
        values = {}
        for row in plan.rows:
            request, table = self._running[row.request_id], self._tables.setdefault(row.request_id, [])
            assert row.blocks_from <= len(table), "the row leaves a hole in its block table"
            table[row.blocks_from :] = row.blocks
            held = [*self.context.kv_manager.blocks(row.request_id)]
            assert len(table) == len(held) and all(
                one == other or other == NO_BLOCK for one, other in zip(table, held, strict=True)
            ), "the row tells another table"
            values[row.request_id] = history([*request.token_ids, *row.drafts], request.cache_salt)
            self.pool.write(table, values[row.request_id], row.start, row.start + row.count)
        for row in plan.rows:
            seen = 0 if self._reach is None else max(0, row.start - self._reach + 1)
            end = row.start + row.count
            self.pool.check(self._tables[row.request_id], values[row.request_id], end, seen)
        return failed

    def _result(self, row: Row) -> RowResult:
        request = self._running[row.request_id]
        return RowResult(request.id, tuple(self._sample(request, row.drafts)) if row.samples else ())

    def _commit(self, request: Request, row: Row, brought: tuple[int, ...]) -> None:
        if row.samples:
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
            priority=parent.priority,
            tenant=parent.tenant,
            ttft_target_s=parent.ttft_target_s,
            tpot_target_s=parent.tpot_target_s,
            arrival_s=parent.arrival_s,
            num_computed=parent.num_prompt - 1,
            first_scheduled_s=parent.first_scheduled_s,
        )
        self.context.kv_manager.fork(parent.id, child.id, child.num_computed)
        self._running[child.id] = child

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id
