"""The paged manager over each cache, step by step: no request ever sees a wrong token in its table.

Every token is written to a shadow pool as a number that stands for all tokens up to it. Tokens are few and
blocks are small, so that prefixes are shared, forked, parked, evicted and computed again all the time; one of
the caches hashes so badly that different prefixes collide.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conch.api import NO_BLOCK, Request, SamplingParams
from conch.api.parking import HostParking, NoParking
from conch.testing import ShadowPool, history
from conch_plugins.kv_managers.paged import PagedKVManager
from conch_plugins.prefix_caches.hash import HashPrefixCache
from conch_plugins.prefix_caches.none import NoPrefixCache
from conch_plugins.prefix_caches.radix import RadixPrefixCache

NUM_BLOCKS = 10


def bad_hash(parent, tokens):
    return bytes([(parent[0] + sum(tokens)) % 3])


CACHES = {
    "none": lambda block_size: NoPrefixCache(),
    "hash": lambda block_size: HashPrefixCache(block_size, "weights"),
    "colliding": lambda block_size: HashPrefixCache(block_size, "weights", bad_hash),
    "radix": lambda block_size: RadixPrefixCache(block_size, "weights"),
}


class PagedMachine(RuleBasedStateMachine):
    """Plans grow tables, park and preempt; a commit moves, writes and inserts, as the engine does."""

    cache_name = ""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        reach=st.sampled_from([None, None, 1, 3, 6]),
        num_slots=st.sampled_from([0, 4, 30]),
    )
    def start(self, block_size, reach, num_slots):
        self.cache = CACHES[self.cache_name](block_size)
        self.manager = PagedKVManager(NUM_BLOCKS, block_size, self.cache, reach)
        self.parking = HostParking(num_slots, block_size) if num_slots else NoParking()
        self.pool = ShadowPool(NUM_BLOCKS, block_size)
        self.size, self.reach = block_size, reach
        self.running, self.waiting = [], []
        self.rows, self.moves = {}, []
        self.begun = {}
        self.last_id = 0

    def new(self, tokens, salt, num_computed=0):
        self.last_id += 1
        return Request(
            self.last_id,
            tokens,
            len(tokens),
            SamplingParams(),
            0,
            1000,
            cache_salt=salt,
            num_computed=num_computed,
        )

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), salt=st.sampled_from(["", "", "s"]))
    def arrive(self, tokens, salt):
        self.waiting.append(self.new(tokens, salt))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data):
        request = data.draw(st.sampled_from(self.waiting))
        match = self.cache.match(request)
        assert match.num_tokens < request.num_tokens
        match = self.parking.table_start(request.id, match)
        held = match.num_tokens
        start = max(held, self.parking.num_tokens(request.id))
        assert start >= request.num_computed
        count = data.draw(st.integers(1, request.num_tokens - start))
        self.manager.adopt(request.id, match.blocks)
        update = self.manager.grow(request.id, held, start + count)
        if update is None:
            self.manager.release(request.id)
            return
        self.moves += update.moves
        self.moves += self.parking.fetch(request.id, self.manager.blocks(request.id), held)
        self.waiting.remove(request)
        self.running.append(request)
        request.num_computed = self.begun[request.id] = start
        self.rows[request.id] = (request, start, start + count)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def grow(self, data):
        request = data.draw(st.sampled_from(self.running))
        if request.id not in self.rows and request.owed:
            self.grow_row(request, data.draw(st.integers(1, request.owed)))

    def grow_row(self, request, count):
        before, start = list(self.manager.blocks(request.id)), request.num_computed
        update = self.manager.grow(request.id, start, start + count)
        self.begun[request.id] = start
        table = list(self.manager.blocks(request.id))
        if update is None:
            assert all(new in (old, NO_BLOCK) for old, new in zip(before, table, strict=True))
            return
        told = [*before[: update.start], *update.blocks]
        assert all(new in (old, NO_BLOCK) for old, new in zip(told, table, strict=True))
        self.rows[request.id] = (request, start, start + count)
        self.moves += update.moves

    @precondition(lambda self: self.running)
    @rule(data=st.data(), park=st.booleans())
    def preempt(self, data, park):
        request = data.draw(st.sampled_from(self.running))
        moves = None
        if park:
            table, kept = self.manager.blocks(request.id), request.num_computed
            moves = self.parking.park(request.id, table, kept, kept)
        effect, free = self.manager.release_effect(request.id), self.manager.free_blocks
        self.leave(request)
        assert self.manager.free_blocks == free + effect.num_freed
        if self.cache_name != "colliding":
            found = self.cache.match(request).num_tokens
            assert found >= min(effect.num_kept, (request.num_tokens - 1) // self.size * self.size)
        if moves is None:
            request.num_computed = 0
        else:
            self.moves += moves
        assert self.parking.num_tokens(request.id) == (0 if moves is None else request.num_computed)
        self.waiting.append(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        self.commit(data)
        self.leave(data.draw(st.sampled_from(self.running)))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel_a_waiting_one(self, data):
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        for _ in range(2):
            self.parking.drop(request.id)
            self.cache.forget(request.id)

    def leave(self, request):
        self.running.remove(request)
        self.rows.pop(request.id, None)
        for _ in range(2):
            self.manager.release(request.id)
        self.cache.forget(request.id)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data):
        self.commit(data)
        parent = data.draw(st.sampled_from(self.running))
        if parent.num_computed:
            shared = data.draw(st.integers(max(1, self.begun[parent.id]), parent.num_computed))
            token = data.draw(st.integers(0, 1))
            child = self.new([*parent.token_ids[:shared], token], parent.cache_salt, shared)
            self.manager.fork(parent.id, child.id, shared)
            self.begun[child.id] = shared
            self.running.append(child)

    @rule(data=st.data())
    def commit(self, data):
        self.pool.move(self.moves)
        for request, start, end in self.rows.values():
            values = history(request.token_ids, request.cache_salt)
            self.pool.write(self.manager.blocks(request.id), values, start, end)
        for request, start, end in self.rows.values():
            request.num_computed = end
            self.check(request, start)
        for request, _, end in self.rows.values():
            self.cache.insert(request, self.manager.blocks(request.id), end)
            if not request.owed:
                request.token_ids.append(data.draw(st.integers(0, 1)))
        self.rows, self.moves = {}, []
        for request in self.running:
            self.check(request, request.num_computed)

    def check(self, request, position):
        """Check all that a query at a position, and those behind it, see."""
        values = history(request.token_ids, request.cache_salt)
        seen = 0 if self.reach is None else max(0, position - self.reach + 1)
        self.pool.check(self.manager.blocks(request.id), values, request.num_computed, seen)

    @rule(data=st.data())
    def evict_all(self, data):
        """One request takes every block that can be had, writes to it, and leaves."""
        self.commit(data)
        free = self.manager.free_blocks
        hog = self.new([0], "hog")
        assert self.manager.grow(hog.id, 0, (free + 1) * self.size) is None
        assert self.manager.grow(hog.id, 0, free * self.size) is not None
        assert self.manager.free_blocks == 0
        assert self.cache.num_evictable == 0
        self.pool.write(self.manager.blocks(hog.id), range(free * self.size), 0, free * self.size)
        self.manager.release(hog.id)
        assert self.manager.free_blocks == free

    @invariant()
    def whole(self):
        self.manager.check_integrity()
        held = {block for request in self.running for block in self.manager.blocks(request.id)}
        assert self.manager.free_blocks == NUM_BLOCKS - len(held - {NO_BLOCK})

    @invariant()
    def nothing_is_parked_for_nobody(self):
        if isinstance(self.parking, HostParking):
            self.parking.check_integrity()
        parked = [request for request in self.waiting if self.parking.num_tokens(request.id)]
        assert (self.parking.num_used > 0) is bool(parked)


def machine(name):
    case = type(f"Paged_{name}", (PagedMachine,), {"cache_name": name}).TestCase
    case.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
    return case


TestPagedWithoutCache = machine("none")
TestPagedWithHashCache = machine("hash")
TestPagedWithCollidingHash = machine("colliding")
TestPagedWithRadixCache = machine("radix")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CACHES)
def test_many_more_steps(name):
    case = machine(name)
    case.settings = settings(case.settings, max_examples=1000, stateful_step_count=100)
    case("runTest").debug()
