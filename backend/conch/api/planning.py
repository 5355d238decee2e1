"""A plan under construction: keeps every promise of `Scheduler.plan`, so that a policy need not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import msgspec

from conch.api.context import BuildContext
from conch.api.plan_parts import KVParts, PlanLimits, Spare
from conch.api.prefix_caching import Match
from conch.api.request import Request, Requests
from conch.api.reserve import Reserve
from conch.api.steps import NO_BLOCK, Admission, Move, Row, StepPlan


class PlanBuilder:
    """Collects rows within a token budget, a number of seats and the KV pool.

    Parameters
    ----------
    requests
        The live requests.
    kv
        Where blocks come from.
    limits
        What bounds the plan.
    """

    def __init__(self, requests: Requests, kv: KVParts, limits: PlanLimits) -> None:
        self._finished = tuple(requests.finished)
        self._has_waiting = next(iter(requests.waiting), None) is not None
        self._candidates: list[Request] = []
        self._may_go: Spare = list
        self._kv, self._cache = kv.manager, kv.cache
        self._parking, self._victims = kv.parking, kv.victims
        self._rows: dict[int, Row] = {}
        self._admitted: dict[int, Admission] = {}
        self._cached: dict[int, int] = {}
        self._preempted: dict[int, Request] = {}
        self._cut: list[Request] = []
        self._kept: dict[int, int] = {}
        self._moves: list[Move] = []
        seated = [*requests.running, *requests.in_flight]
        self._reserve = Reserve(kv.manager, limits, seated, self._preempted)
        self._most_decodes = -(-len(seated) // limits.micro_batches)
        self._split_prompts = limits.split_prompts
        self.tokens_left = limits.max_tokens
        self.seats_left = limits.max_seats - sum(request.seats for request in seated)

    @classmethod
    def for_context(cls, context: BuildContext) -> Callable[[Requests], PlanBuilder]:
        """Return what begins a plan within the configured limits."""
        return partial(cls, kv=KVParts.for_context(context), limits=PlanLimits.for_context(context))

    @property
    def has_preempted(self) -> bool:
        """Whether this plan took blocks away from someone: a poor moment to admit anyone."""
        return bool(self._preempted)

    @property
    def preempted(self) -> Collection[Request]:
        """Whom this plan sends back to wait; a live view."""
        return self._preempted.values()

    @property
    def prompt_share(self) -> int:
        """Half of what is left of the budget; all of it where prompts are not split."""
        return -(-self.tokens_left // 2) if self._split_prompts else self.tokens_left

    def has_room_for(self, *waiting: Request) -> bool:
        """Whether seats and pool would do for all of these, whatever the prefix cache has of them."""
        seats = sum(request.seats for request in waiting)
        blocks = sum(self._reserve.short(request) for request in waiting)
        return seats <= self.seats_left and blocks <= self._kv.free_blocks - self._reserve.num_blocks

    def pay_all(self, running: Sequence[Request]) -> None:
        """Pay running requests in the order given: those owed one token first, then chunks of prompts.

        While anyone waits, prompts under way leave half of the budget to whom you admit; what is not taken
        comes back to them when the plan is built. See `conch.api.PromptTurns` for a fairer division.
        """
        prompts = self.pay_decodes(running)
        room = self.prompt_share if self._has_waiting else self.tokens_left
        for request in prompts:
            before = self.tokens_left
            self.pay_or_preempt(request, room)
            room -= max(0, before - self.tokens_left)

    def pay_decodes(self, running: Sequence[Request], may_go: Spare = list) -> list[Request]:
        """Pay those who are owed one token; returns the others, whose prompts are under way.

        While the pool is short somebody of `running` is preempted, be it the very one that is to be paid:
        the victim policy says who, of those that `may_go` picks from the candidates. Whoever has not brought
        a token since its admission is spared while there is anyone else. So each preemption costs its victim
        a token that it had brought, and since the tokens of all requests are limited, preemptions come to an
        end.
        """
        self._candidates, self._may_go = list(running), may_go
        decodes = [request for request in running if request.owed == 1][: self._most_decodes]
        behind = len(decodes)
        for request in decodes:
            behind -= 1
            self._pay_or_preempt(request, None, max(0, self.tokens_left - 1 - behind))
        return [request for request in running if request.owed > 1 and request.id not in self._preempted]

    def pay_or_preempt(self, request: Request, most: int | None = None) -> None:
        """Pay a request of those given to `pay_decodes`, with somebody of those preempted if need be."""
        self._pay_or_preempt(request, most, 0)
        row = self._rows.get(request.id)
        if row is not None and not row.samples:
            self._cut.append(request)

    def top_up(self, request: Request) -> None:
        """Give a request that has a row more of what it is owed, as far as budget and pool reach."""
        row = self._rows.get(request.id)
        if row is None or row.samples or self.tokens_left <= 0:
            return
        owed = request.num_tokens - row.start
        count = min(owed, row.count + self.tokens_left)
        update = self._reserve.grow(request, row.start, row.start + count)
        if update is None:
            return
        table = self._kv.blocks(request.id)[row.blocks_from :]
        blocks = tuple(max(0, block) for block in table)  # workers know no NO_BLOCK
        self._rows[request.id] = msgspec.structs.replace(
            row, count=count, samples=count == owed, blocks=blocks
        )
        self._note(update.moves)
        self.tokens_left -= count - row.count

    def pay(self, request: Request, most: int | None = None, most_drafts: int | None = None) -> bool:
        """Give a running request a row of what it is owed, at most `most` tokens and the budget.

        Drafts ride along when all owed tokens are paid and budget, pool and the request's limit have room.
        Returns False, with nothing changed, when the KV pool cannot hold the row; True when there is
        nothing to pay.
        """
        assert request.id not in self._rows, "a request has at most one row"
        owed, start = request.owed, request.num_computed
        count = min(owed, self.tokens_left) if most is None else min(owed, self.tokens_left, most)
        if count <= 0:
            return True
        samples = count == owed
        drafts = request.drafts
        if drafts:
            drafts = drafts[: self._room(request, count, most_drafts)] if samples else ()
        update = self._reserve.grow(request, start, start + count + len(drafts))
        if update is None and drafts:
            drafts = ()
            update = self._reserve.grow(request, start, start + count)
        if update is None:
            return False
        count += len(drafts)
        self._add_row(request, Row(request.id, start, count, samples, drafts, update.start, update.blocks))
        self._note(update.moves)
        self.tokens_left -= count
        return True

    def admit(self, request: Request, most: int | None = None) -> bool:
        """Let a waiting request run: take its cached prefix and pay its first row.

        Asks that the pool can hold all that it and everyone who runs is owed, and the token that each
        samples next, so that an admission does not force a preemption at once; and that the watermark stays
        free, unless nobody else runs. KV that was parked is brought back. Returns False, with nothing
        changed, when a seat, the budget or the pool is short.
        """
        if request.seats > self.seats_left or self.tokens_left <= 0:
            return False
        match = self._parking.table_start(request.id, self._cache.match(request))
        if self._admit_behind(match, request, most):
            return True
        whole = match.whole_blocks(self._kv.block_size)  # takes a block less: the copy of the last one
        return whole.num_tokens < match.num_tokens and self._admit_behind(whole, request, most)

    def _admit_behind(self, match: Match, request: Request, most: int | None) -> bool:
        """Admit a request behind what is cached or parked of it."""
        held = match.num_tokens
        start = max(held, min(self._parking.num_tokens(request.id), request.num_computed))
        self._kv.adopt(request.id, match.blocks)  # from here on the match cannot be evicted
        short = self._reserve.short(request) + (held % self._kv.block_size > 0)
        fits = short <= self._kv.free_blocks - self._reserve.num_blocks
        if fits and match.num_below and start == held:
            held = start = self._bring_back(match, request)
        owed = request.num_tokens - start
        count = min(owed, self.tokens_left, owed if most is None else most)
        if count < owed and not self._split_prompts:
            fits = False
        update = self._kv.grow(request.id, held, start + count) if fits else None
        if update is None:
            self._kv.release(request.id)
            return False
        self._reserve.join(request)
        self._add_row(request, Row(request.id, start, count, count == owed, (), 0, ()))
        self._note(update.moves)
        self._note(self._parking.fetch(request.id, self._kv.blocks(request.id), held))
        self._cached[request.id] = held
        self.tokens_left -= count
        self.seats_left -= request.seats
        return True

    def _bring_back(self, match: Match, request: Request) -> int:
        """Fill blocks behind a match from lower tiers; returns the tokens that are in place then."""
        start = match.num_tokens
        if self._kv.grow(request.id, start, start + match.num_below) is None:
            return start
        return self._cache.restore(request, self._kv.blocks(request.id), start)

    def _note(self, moves: Sequence[Move]) -> None:
        """List moves behind those that the prefix cache has decided on before them."""
        if moves:
            self._moves += self._cache.take_moves()
            self._moves += moves

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks and its row, if it has one, and send it back to wait.

        Its KV is parked where there is room for it, and where that pays.

        Moves planned for it stay: they are made in order, so they harm nobody.
        """
        assert request.id not in self._cached, "admitted in this very plan"
        row = self._rows.pop(request.id, None)
        if row is not None:
            self.tokens_left += row.count
        self._admitted.pop(request.id, None)
        self._park(request)
        self._kv.release(request.id)
        self._cache.forget(request.id)
        self._preempted[request.id] = request
        self._candidates = [one for one in self._candidates if one is not request]
        self._reserve.recount()
        self.seats_left += request.seats

    def build(self) -> StepPlan | None:
        """Give what is left to prompts that were cut, and freeze the plan; None when it says nothing."""
        for request in self._cut:
            self.top_up(request)
        if not self._rows and not self._preempted:
            return None
        self._moves += self._cache.take_moves()
        return StepPlan(
            rows=tuple(self._rows.values()),
            admitted=tuple(self._admitted.values()),
            cached=self._cached,
            preempted=tuple(self._preempted),
            kept=self._kept,
            finished=self._finished,
            moves=tuple(self._moves),
        )

    def _pay_or_preempt(self, request: Request, most: int | None, most_drafts: int) -> None:
        while request.id not in self._preempted and not self.pay(request, most, most_drafts):
            may_go = self._may_go(self._candidates)
            victim = self._victims.choose([one for one in may_go if one.has_advanced] or may_go[-1:])
            self.preempt(victim)

    def _park(self, request: Request) -> None:
        num_tokens = request.num_computed
        lost = max(0, num_tokens - self._kv.release_effect(request.id).num_kept)
        moves = self._parking.park(request.id, self._kv.blocks(request.id), num_tokens, lost)
        if moves is not None:
            self._note(moves)
            self._kept[request.id] = num_tokens

    def _room(self, request: Request, count: int, most_drafts: int | None) -> int:
        """Drafts of use: each that is accepted is a token, and one more is sampled after them."""
        room = min(self.tokens_left - count, request.limit - request.num_tokens - 1)
        return max(0, room if most_drafts is None else min(room, most_drafts))

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
            if table and table[0] == NO_BLOCK:  # which is no index: workers get one that nobody reads
                table = tuple(max(0, block) for block in table)
            row = msgspec.structs.replace(row, blocks_from=0, blocks=table)
        self._rows[request.id] = row
