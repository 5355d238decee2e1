"""The engine loop: plan, execute, commit.

A request is owed ``num_tokens - num_computed`` tokens; the scheduler pays some, the workers compute
them, and commit makes the news true. Every decision is a plugin's; nothing here knows which.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field

from conch.api.errors import ErrorCode, RequestError
from conch.api.parking import NoParking, Parking
from conch.api.prefix_caching import PrefixCache
from conch.api.request import Request
from conch.api.seams import KVManager, Parallelism, Scheduler
from conch.api.steps import Failure, FinishReason, RequestOutput, Row, RowResult, StepPlan, StepResult, Usage
from conch.engine.admission import Admission, Limits
from conch.engine.choices import Choices
from conch.engine.counters import Counters
from conch.engine.deadlines import Deadlines
from conch.engine.ending import cut
from conch.engine.in_flight import InFlight
from conch.engine.observing import experts_of, observer_of
from conch.engine.overlap import overlap_of
from conch.engine.protocol import AddRequest, CancelRequest, EngineStats
from conch.engine.request_table import RequestTable


@dataclass(frozen=True, slots=True)
class Parts:
    """The plugins that an engine runs on."""

    scheduler: Scheduler
    kv_manager: KVManager
    prefix_cache: PrefixCache
    parallelism: Parallelism
    parking: Parking = field(default_factory=NoParking)


class Engine:
    """Serves requests step by step. One thread; the only writer of requests.

    Parameters
    ----------
    parts
        The plugins in force.
    limits
        What bounds every request.
    seed
        Where the seeds of unseeded requests come from; None is the operating system.
    """

    def __init__(self, parts: Parts, limits: Limits, seed: int | None = None) -> None:
        self._scheduler = parts.scheduler
        self._observer = observer_of(parts.scheduler)
        self._kv = parts.kv_manager
        self._block_size = parts.kv_manager.block_size
        self._cache = parts.prefix_cache
        self._parking = parts.parking
        self._parallelism = parts.parallelism
        self._experts = experts_of(parts.parallelism)
        self._limits = limits
        self._admission = Admission(limits, seed)
        self._requests = RequestTable()
        self._choices = Choices()
        self._deadlines = Deadlines()
        self._in_flight = InFlight(parts.parallelism.depth)
        self._overlap = overlap_of(self._requests, parts.parallelism.depth)
        self._counters = Counters()
        self._outbox: list[RequestOutput] = []

    # -- the loop ---------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Plan and submit while there is room, then commit the oldest step; returns all news."""
        now = time.monotonic()
        self._expire(now)
        while self._in_flight.has_room and (plan := self._scheduler.plan(self._overlap.requests)):
            self._apply(plan)
            self._in_flight.add(plan, self._parallelism.submit(plan), now)
        if not self._in_flight.is_empty:
            plan, ticket = self._in_flight.pop_oldest()
            result = self._parallelism.collect(ticket)
            seconds = self._in_flight.lap()
            self._observer.observe(plan, result, seconds)
            self._counters.count_times(result, seconds)
            self._commit(plan, result)
        return self._take_news()

    @property
    def has_work(self) -> bool:
        """Whether `step` would bring anything."""
        return bool(
            self._requests.num_running
            or self._requests.num_waiting
            or not self._in_flight.is_empty
            or self._outbox
        )

    def _apply(self, plan: StepPlan) -> None:
        fresh = [
            request
            for admission in plan.admitted
            if (request := self._requests.get(admission.request_id)) and request.first_scheduled_s is None
        ]
        self._requests.apply(plan)
        self._overlap.begin(plan)
        self._counters.count_plan(plan, fresh)

    def _commit(self, plan: StepPlan, result: StepResult) -> None:
        in_vain = self._overlap.end(plan)
        for row, brought in zip(plan.rows, result.rows, strict=True):
            request = self._requests.get(row.request_id)
            if request is not None and row.request_id not in in_vain:  # it may have been cancelled meanwhile
                self._commit_row(request, row, brought)
        self._cache.end_step(plan.moves, result.failed_moves)

    def _commit_row(self, request: Request, row: Row, brought: RowResult) -> None:
        if brought.failure is not None:
            self._cache.discard(self._kv.blocks(request.id))  # earlier chunks may have been broken too
            self._fail(self._choices.whose(request.id)[0], brought.failure)
            return
        token_ids, reason = cut(request, brought.token_ids, self._limits.eos_token_ids)
        rejected = len(row.drafts) + 1 - len(brought.token_ids) if row.samples else 0
        request.num_computed -= rejected  # their KV will be overwritten
        request.token_ids.extend(token_ids)
        computed = row.start + row.count - rejected
        if computed // self._block_size > row.start // self._block_size:  # the row has filled a block
            self._cache.insert(request, self._kv.blocks(request.id), min(computed, request.num_tokens))
        if row.samples:
            request.drafts = brought.drafts
            self._tell(request, row, brought, token_ids, reason)

    def _tell(
        self,
        request: Request,
        row: Row,
        brought: RowResult,
        token_ids: tuple[int, ...],
        reason: FinishReason | None,
    ) -> None:
        """Fork pending choices, put the new tokens into the news, and end the request if this is its end."""
        if request.first_token_s is None:
            request.first_token_s = time.monotonic()
        request.num_drafted += len(row.drafts)
        request.num_accepted += len(brought.token_ids) - 1
        self._counters.count_row(row, brought, len(token_ids))
        for choice in request.pending_forks:
            self._fork(request, choice)
        request.pending_forks = ()
        client_id, choice = self._choices.whose(request.id)
        logprobs = None if brought.logprobs is None else brought.logprobs[: len(token_ids)]
        usage = None if reason is None else self._usage(request)
        self._outbox.append(RequestOutput(client_id, choice, token_ids, logprobs, reason, usage))
        if reason is not None:
            self._end(request)

    def _fork(self, parent: Request, choice: int) -> None:
        child = self._admission.fork(parent, choice)
        self._kv.fork(parent.id, child.id, child.num_computed)
        self._requests.start_fork(child)
        self._choices.add(self._choices.whose(parent.id)[0], choice, child.id)
        self._deadlines.add(child)

    # -- arrivals and departures ------------------------------------------------------------------

    def add(self, message: AddRequest) -> None:
        """Take a request in; one that cannot be served fails in the next news."""
        try:
            request = self._admission.build(message, self._requests.num_waiting, self._seats_left())
        except RequestError as error:
            self._outbox.append(RequestOutput(message.request_id, 0, failure=Failure(error.code, str(error))))
            return
        self._choices.add(message.request_id, 0, request.id)
        self._requests.queue(request)
        self._deadlines.add(request)

    def cancel(self, message: CancelRequest) -> None:
        """End a request or some of its choices, wherever they are; unknown ones are ignored."""
        for request_id in self._choices.requests(message.request_id):
            request = self._requests.get(request_id)
            assert request is not None, "the book of choices lists live requests only"
            for choice in request.pending_forks if message.choices else ():
                self._cancel_pending(message, request, choice)
            _, own = self._choices.whose(request_id)
            if own in message.choices or not message.choices:
                self._cancel(request)

    def _cancel_pending(self, message: CancelRequest, request: Request, choice: int) -> None:
        if choice in message.choices:
            request.pending_forks = tuple(c for c in request.pending_forks if c != choice)
            self._outbox.append(
                RequestOutput(
                    message.request_id,
                    choice,
                    finish_reason=FinishReason.CANCELLED,
                    usage=self._usage(request),
                )
            )

    def _cancel(self, request: Request) -> None:
        client_id, choice = self._choices.whose(request.id)
        usage = self._usage(request)
        for pending in (choice, *request.pending_forks):
            self._outbox.append(
                RequestOutput(client_id, pending, finish_reason=FinishReason.CANCELLED, usage=usage)
            )
        self._end(request)

    def _expire(self, now_s: float) -> None:
        for request_id in self._deadlines.due(now_s):
            request = self._requests.get(request_id)
            if request is None:
                continue
            if request.deadline_s <= now_s:
                waited = "its timeout has passed"
            elif request.first_scheduled_s is None:
                waited = f"it waited longer than queue_timeout_s ({self._limits.queue_timeout_s} s)"
            else:
                continue
            client_id, _ = self._choices.whose(request_id)
            self._fail(client_id, Failure(ErrorCode.TIMEOUT, f"the request timed out: {waited}"))

    def _fail(self, client_id: int, failure: Failure) -> None:
        for request_id in self._choices.requests(client_id):
            request = self._requests.get(request_id)
            assert request is not None, "the book of choices lists live requests only"
            self._end(request)
        self._outbox.append(RequestOutput(client_id, 0, failure=failure))

    def _end(self, request: Request) -> None:
        self._requests.remove(request)
        self._kv.release(request.id)
        self._cache.forget(request.id)
        self._parking.drop(request.id)
        self._choices.remove(request.id)
        self._deadlines.forget(request)

    # -- accounts ---------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return a snapshot of gauges and counters."""
        used, tiers = self._kv.num_blocks - self._kv.free_blocks, self._cache.stats()
        most = self._limits.held_tokens or self._limits.max_model_len
        return EngineStats(
            running=self._requests.num_running,
            waiting=self._requests.num_waiting,
            kv_blocks_used=used,
            kv_blocks_total=self._kv.num_blocks,
            kv_blocks_parked=self._parking.num_used,
            swap_blocks_total=self._parking.num_slots,
            prefix_host_blocks=tiers.host_blocks,
            prefix_disk_blocks=tiers.disk_blocks,
            prefix_host_hits=tiers.host_hits,
            prefix_disk_hits=tiers.disk_hits,
            experts=self._experts.expert_load(),
            kv_tokens_used=sum(min(request.num_computed, most) for request in self._requests.running),
            **asdict(self._counters),
        )

    def close(self) -> None:
        """Stop the workers, and whoever tells what is cached."""
        self._parallelism.close()
        self._cache.close()

    def _seats_left(self) -> int:
        """Seats that let the queue be longer; not counted while it is short enough without them."""
        if self._requests.num_waiting < self._limits.max_queue_size:
            return 0
        return self._limits.max_num_seqs - sum(request.seats for request in self._requests.running)

    def _take_news(self) -> list[RequestOutput]:
        news, self._outbox = self._outbox, []
        return news

    def _usage(self, request: Request) -> Usage:
        now, arrival = time.monotonic(), request.arrival_s
        return Usage(
            num_prompt=request.num_prompt,
            num_output=request.num_tokens - request.num_prompt,
            num_cached=request.num_cached,
            num_preemptions=request.num_preemptions,
            queue_s=(request.first_scheduled_s or now) - arrival,
            ttft_s=None if request.first_token_s is None else request.first_token_s - arrival,
            total_s=now - arrival,
            num_draft_tokens=request.num_drafted,
            num_accepted_tokens=request.num_accepted,
        )
