"""The paged manager over each cache, step by step: no request ever sees a wrong token in its table.

Every token is written to a shadow pool as a number that stands for all tokens up to it. Tokens are few and
blocks are small, so that prefixes are shared, forked, evicted and computed again all the time; one of the
caches hashes so badly that different prefixes collide.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conch.api import Request, SamplingParams
from conch.testing import ShadowPool, history
from conch_plugins.kv_managers.paged import PagedKVManager
from conch_plugins.prefix_caches.hash import HashPrefixCache
from conch_plugins.prefix_caches.none import NoPrefixCache

NUM_BLOCKS = 10


def bad_hash(parent, tokens):
    return bytes([(parent[0] + sum(tokens)) % 3])


CACHES = {
    "none": lambda block_size: NoPrefixCache(),
    "hash": lambda block_size: HashPrefixCache(block_size, "weights"),
    "colliding": lambda block_size: HashPrefixCache(block_size, "weights", bad_hash),
}


class PagedMachine(RuleBasedStateMachine):
    """Plans grow tables and preempt; a commit copies, writes and inserts, as the engine does."""

    cache_name = ""

    @initialize(block_size=st.sampled_from([1, 2, 4]))
    def start(self, block_size):
        self.cache = CACHES[self.cache_name](block_size)
        self.manager = PagedKVManager(NUM_BLOCKS, block_size, self.cache)
        self.pool = ShadowPool(NUM_BLOCKS, block_size)
        self.size = block_size
        self.running, self.waiting = [], []
        self.rows, self.moves = {}, []
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
        assert len(match.blocks) == -(-match.num_tokens // self.size)
        self.manager.adopt(request.id, match.blocks)
        self.waiting.remove(request)
        self.running.append(request)
        request.num_computed = match.num_tokens
        self.grow_row(request, data.draw(st.integers(1, request.owed)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def grow(self, data):
        request = data.draw(st.sampled_from(self.running))
        if request.id not in self.rows and request.owed:
            self.grow_row(request, data.draw(st.integers(1, request.owed)))

    def grow_row(self, request, count):
        before, free = list(self.manager.blocks(request.id)), self.manager.free_blocks
        update = self.manager.grow(request.id, request.num_computed, request.num_computed + count)
        if update is None:
            assert list(self.manager.blocks(request.id)) == before
            assert self.manager.free_blocks == free
            return
        assert [*before[: update.start], *update.blocks] == list(self.manager.blocks(request.id))
        self.rows[request.id] = (request, request.num_computed, request.num_computed + count)
        self.moves += update.moves

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data):
        request = data.draw(st.sampled_from(self.running))
        self.leave(request)
        request.num_computed = 0
        self.waiting.append(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        self.commit(data)
        self.leave(data.draw(st.sampled_from(self.running)))

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
            shared = data.draw(st.integers(1, parent.num_computed))
            token = data.draw(st.integers(0, 1))
            child = self.new([*parent.token_ids[:shared], token], parent.cache_salt, shared)
            self.manager.fork(parent.id, child.id, shared)
            self.running.append(child)

    @rule(data=st.data())
    def commit(self, data):
        self.pool.move(self.moves)
        for request, start, end in self.rows.values():
            values = history(request.token_ids, request.cache_salt)
            self.pool.write(self.manager.blocks(request.id), values, start, end)
        for request, _, end in self.rows.values():
            request.num_computed = end
            self.check(request)
        for request, _, end in self.rows.values():
            self.cache.insert(request, self.manager.blocks(request.id), end)
            if not request.owed:
                request.token_ids.append(data.draw(st.integers(0, 1)))
        self.rows, self.moves = {}, []
        for request in self.running:
            self.check(request)

    def check(self, request):
        values = history(request.token_ids, request.cache_salt)
        self.pool.check(self.manager.blocks(request.id), values, request.num_computed)

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
        used = len({block for request in self.running for block in self.manager.blocks(request.id)})
        assert self.manager.free_blocks == NUM_BLOCKS - used


def machine(name):
    case = type(f"Paged_{name}", (PagedMachine,), {"cache_name": name}).TestCase
    case.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
    return case


TestPagedWithoutCache = machine("none")
TestPagedWithHashCache = machine("hash")
TestPagedWithCollidingHash = machine("colliding")
