"""Each cache beside the plainest one that could be: a dict from every prefix to its block.

Real requests run through a real manager over a small pool, with few different tokens, so that prefixes fork
in the middle of blocks, are evicted and come back all the time. What a cache finds must be exactly what the
dict says: never less, so that no hit is lost, and never more.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conch.api import Request, SamplingParams
from conch_plugins.kv_managers.paged import PagedKVManager
from conch_plugins.prefix_caches.hash import HashPrefixCache
from conch_plugins.prefix_caches.radix import RadixPrefixCache

NUM_BLOCKS = 12


class Recording:
    """A cache that tells which blocks it gave up."""

    def __init__(self, cache):
        self._cache = cache
        self.gone = []

    def __getattr__(self, name):
        return getattr(self._cache, name)

    def evict(self, count):
        evicted = self._cache.evict(count)
        self.gone += evicted
        return evicted


class CacheMachine(RuleBasedStateMachine):
    """Requests come, grow, fork, fail and go."""

    make = None
    is_partial = False

    @initialize(block_size=st.sampled_from([1, 2, 4]))
    def start(self, block_size):
        self.size = block_size
        self.cache = Recording(type(self).make(block_size))
        self.manager = PagedKVManager(NUM_BLOCKS, block_size, self.cache)
        self.prefixes = {}
        self.live = []
        self.offered = {}
        self.last_id = 0

    def new(self, tokens, salt, num_computed=0):
        self.last_id += 1
        return Request(
            self.last_id,
            list(tokens),
            len(tokens),
            SamplingParams(),
            0,
            1000,
            cache_salt=salt,
            num_computed=num_computed,
        )

    # -- the dict

    def key(self, request, num_blocks):
        return request.cache_salt, tuple(request.token_ids[: num_blocks * self.size])

    def sync(self):
        """Forget what was evicted."""
        gone, self.cache.gone = set(self.cache.gone), []
        self.prefixes = {key: block for key, block in self.prefixes.items() if block not in gone}

    def expected(self, request):
        """Return the blocks of the longest prefix, and the tokens found with them."""
        most = request.num_tokens - 1
        blocks = []
        while (len(blocks) + 1) * self.size <= most:
            block = self.prefixes.get(self.key(request, len(blocks) + 1))
            if block is None:
                break
            blocks.append(block)
        whole = len(blocks) * self.size
        partial = max(
            (
                agreement(tokens[whole:], request.token_ids[whole:most])
                for salt, tokens in self.prefixes
                if salt == request.cache_salt
                and len(tokens) == whole + self.size
                and list(tokens[:whole]) == request.token_ids[:whole]
            ),
            default=0,
        )
        return blocks, whole + (partial if partial >= max(1, self.size // 4) else 0)

    def is_orphaned(self, request, num_blocks):
        """Whether blocks behind a prefix are cached though the last block of the prefix is not."""
        salt, prefix = self.key(request, num_blocks)
        return (salt, prefix) not in self.prefixes and any(
            other == salt and len(tokens) > len(prefix) and tokens[: len(prefix)] == prefix
            for other, tokens in self.prefixes
        )

    # -- rules

    @precondition(lambda self: len(self.live) < 5)
    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=20), salt=st.sampled_from(["", "", "s"]))
    def arrive(self, tokens, salt):
        request = self.new(tokens, salt)
        match = self.cache.match(request)
        blocks, num_tokens = self.expected(request)
        assert match.num_below == 0
        if self.is_partial and not self.is_orphaned(request, len(blocks) + 1):
            assert match.num_tokens == num_tokens
        assert match.num_tokens in (num_tokens, len(blocks) * self.size)
        assert list(match.blocks[: len(blocks)]) == blocks
        assert len(match.blocks) == -(-match.num_tokens // self.size)
        if len(match.blocks) > len(blocks):
            assert match.blocks[-1] in self.prefixes.values()
        self.manager.adopt(request.id, match.blocks)
        request.num_computed = match.num_tokens
        if self.manager.grow(request.id, match.num_tokens, match.num_tokens + 1) is None:
            self.manager.release(request.id)
            self.cache.forget(request.id)
            return
        self.sync()
        self.live.append(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def compute(self, data):
        request = data.draw(st.sampled_from(self.live))
        if not request.owed:
            request.token_ids.append(data.draw(st.integers(0, 2)))
        end = request.num_computed + data.draw(st.integers(1, request.owed))
        if self.manager.grow(request.id, request.num_computed, end) is None:
            return
        self.sync()
        request.num_computed = end
        table = self.manager.blocks(request.id)
        self.cache.insert(request, table, end)
        for count in range(1, end // self.size + 1):
            key, block = self.key(request, count), table[count - 1]
            if key in self.prefixes:
                continue
            if count > self.offered.get(request.id, 0):
                assert self.cache.holds(block), "a new block was not remembered"
            if self.cache.holds(block):
                assert block not in self.prefixes.values()
                self.prefixes[key] = block
        self.offered[request.id] = end // self.size

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(self.live))
        if parent.num_computed:
            shared = data.draw(st.integers(1, parent.num_computed))
            child = self.new(
                [*parent.token_ids[:shared], data.draw(st.integers(0, 2))], parent.cache_salt, shared
            )
            self.manager.fork(parent.id, child.id, shared)
            self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), has_failed=st.booleans())
    def leave(self, data, has_failed):
        request = data.draw(st.sampled_from(self.live))
        self.live.remove(request)
        if has_failed:
            blocks = set(self.manager.blocks(request.id))
            self.cache.discard(list(blocks))
            self.prefixes = {key: block for key, block in self.prefixes.items() if block not in blocks}
        self.manager.release(request.id)
        self.cache.forget(request.id)

    @rule(count=st.integers(0, 4))
    def evict(self, count):
        """Blocks without a user go in the order in which they lost it."""
        order = list(self.cache._evictable)
        hog = self.new([0], "hog")
        free = self.manager.free_blocks - self.cache.num_evictable + min(count, self.cache.num_evictable)
        if free:
            assert self.manager.grow(hog.id, 0, free * self.size) is not None
        assert self.cache.gone == order[:count]
        self.sync()
        self.manager.release(hog.id)

    @invariant()
    def whole(self):
        self.manager.check_integrity()
        assert {block for block in range(NUM_BLOCKS) if self.cache.holds(block)} == set(
            self.prefixes.values()
        )

    def teardown(self):
        if not hasattr(self, "live"):
            return
        for request in self.live:
            self.manager.release(request.id)
            self.cache.forget(request.id)
        self.cache.evict(NUM_BLOCKS)
        assert self.cache.num_evictable == 0
        self.check_empty()

    def check_empty(self):
        """Nothing is left of what was forgotten."""


def agreement(one, other):
    differ = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


class HashMachine(CacheMachine):
    make = staticmethod(lambda block_size: HashPrefixCache(block_size, "weights"))

    def check_empty(self):
        assert not self.cache._by_digest and not self.cache._chains


class RadixMachine(CacheMachine):
    make = staticmethod(lambda block_size: RadixPrefixCache(block_size, "weights"))
    is_partial = True

    @invariant()
    def well_formed(self):
        """Runs begin where their parents end, blocks are where they belong, and nothing is kept in vain."""
        size = self.size * 4
        nodes = [*self.cache._tree._top.children.values()]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            assert node.start == node.parent.end and node.parent.children[node.key] is node
            if node.parent.parent is None:
                assert not node.tokens and not node.blocks
                continue
            assert node.key == bytes(node.tokens[:4])
            indices = list(range(node.start // size, node.end // size))
            assert [entry.index for entry in node.blocks] == indices
            for entry in node.blocks:
                assert entry.node is node and entry.is_stored == (entry.block is not None)
            if not node.children:
                assert node.blocks and node.blocks[-1].is_stored and node.end % size == 0
            if len(node.children) == 1:
                assert len(node.tokens) >= size, "a short run was left alone"

    def check_empty(self):
        assert not self.cache._tree._top.children and not self.cache._trails


def case(machine):
    machine.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
    return machine.TestCase


TestHash = case(HashMachine)
TestRadix = case(RadixMachine)
