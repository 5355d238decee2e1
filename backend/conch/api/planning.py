"""A plan under construction: keeps every promise of `Scheduler.plan`, so that a policy need not."""

from __future__ import annotations

import msgspec

from conch.api.request import Request, Requests
from conch.api.seams import KVManager, PrefixCache
from conch.api.steps import Admission, Row, StepPlan


class PlanBuilder:
    """Collects rows within a token budget, a number of seats and the KV pool.

    Parameters
    ----------
    requests
        The live requests.
    kv_manager, prefix_cache
        Where blocks come from.
    max_tokens
        Token budget of the step.
    max_seats
        Requests that may run at once.
    """

    def __init__(
        self,
        requests: Requests,
        kv_manager: KVManager,
        prefix_cache: PrefixCache,
        max_tokens: int,
        max_seats: int,
    ) -> None:
        self._finished = tuple(requests.finished)
        self._kv = kv_manager
        self._cache = prefix_cache
        self._rows: dict[int, Row] = {}
        self._admitted: dict[int, Admission] = {}
        self._cached: dict[int, int] = {}
        self._preempted: list[int] = []
        self._copies: dict[int, list[tuple[int, int]]] = {}
        self.tokens_left = max_tokens
        self.seats_left = max_seats - sum(request.seats for request in requests.running)

    @property
    def has_preempted(self) -> bool:
        """Whether this plan took blocks away from someone: a poor moment to admit anyone."""
        return bool(self._preempted)

    def pay(self, request: Request, most: int | None = None) -> bool:
        """Give a running request a row of what it is owed, at most `most` tokens and the budget.

        Drafts ride along when all owed tokens are paid and the budget has room. Returns False, with nothing
        changed, when the KV pool cannot hold the row; True when there is nothing to pay.
        """
        owed, start = request.owed, request.num_computed
        count = min(owed, self.tokens_left, owed if most is None else most)
        if count <= 0:
            return True
        samples = count == owed
        drafts = request.drafts[: self.tokens_left - count] if samples else ()
        update = self._kv.grow(request.id, start, start + count + len(drafts))
        if update is None:
            return False
        count += len(drafts)
        self._add_row(request, Row(request.id, start, count, samples, drafts, update.start, update.blocks))
        self._copies[request.id] = list(update.copies)
        self.tokens_left -= count
        return True

    def admit(self, request: Request, most: int | None = None) -> bool:
        """Let a waiting request run: take its cached prefix and pay its first row.

        Asks that the pool can hold all that it is owed, not only the first chunk, so that an admission
        does not force a preemption at once. Returns False, with nothing changed, when a seat, the budget
        or the pool is short.
        """
        if request.seats > self.seats_left or self.tokens_left <= 0:
            return False
        blocks = self._cache.match(request)
        start = len(blocks) * self._kv.block_size
        self._kv.adopt(request.id, blocks)  # from here on the match cannot be evicted
        needed = -(-request.num_tokens // self._kv.block_size) - len(blocks)
        count = min(request.num_tokens - start, self.tokens_left)
        count = count if most is None else min(count, most)
        update = self._kv.grow(request.id, start, start + count) if needed <= self._kv.free_blocks else None
        if update is None:
            self._kv.release(request.id)
            return False
        samples = start + count == request.num_tokens
        self._add_row(request, Row(request.id, start, count, samples, (), 0, ()))
        self._copies[request.id] = list(update.copies)
        self._cached[request.id] = start
        self.tokens_left -= count
        self.seats_left -= request.seats
        return True

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks and its row, if it has one, and send it back to wait."""
        assert request.id not in self._cached, "admitted in this very plan"
        row = self._rows.pop(request.id, None)
        if row is not None:
            self.tokens_left += row.count
        self._copies.pop(request.id, None)
        self._admitted.pop(request.id, None)
        self._kv.release(request.id)
        self._cache.forget(request.id)
        self._preempted.append(request.id)
        self.seats_left += request.seats

    def build(self) -> StepPlan | None:
        """Freeze the plan; None when it says nothing."""
        if not self._rows and not self._preempted:
            return None
        return StepPlan(
            rows=tuple(self._rows.values()),
            admitted=tuple(self._admitted.values()),
            cached=self._cached,
            preempted=tuple(self._preempted),
            finished=self._finished,
            copies=tuple(pair for pairs in self._copies.values() for pair in pairs),
        )

    def _add_row(self, request: Request, row: Row) -> None:
        """Keep a row; workers that do not know the request get it, and its block table, in full."""
        if not request.is_known:
            self._admitted[request.id] = Admission(
                request.id,
                tuple(request.token_ids),
                request.num_prompt,
                request.params,
                request.seed,
                request.limit,
            )
            table = tuple(self._kv.blocks(request.id))
            row = msgspec.structs.replace(row, blocks_from=0, blocks=table)
        self._rows[request.id] = row
