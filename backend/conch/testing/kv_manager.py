"""What every KV manager promises."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from conch.api import BuildContext, KVManager, Move, Request, SamplingParams
from conch.testing.context import SMALL_ATTENTION, make_context
from conch.testing.shadow import ShadowPool, history

BLOCK = 4


class KVManagerContract:
    """Inherit, implement `build`, and let pytest collect the subclass."""

    def build(self, context: BuildContext) -> KVManager:
        """Build the KV manager under test, of `context.num_blocks` blocks over `context.prefix_cache`."""
        raise NotImplementedError

    def manager(self, num_blocks: int = 8, caching: bool = False) -> KVManager:
        """Return a manager of blocks of four tokens."""
        return self.build(make_context(num_blocks=num_blocks, enable_prefix_caching=caching))

    def test_is_a_kv_manager(self) -> None:
        """It has the methods of the seam, and an empty pool."""
        manager = self.manager()
        assert isinstance(manager, KVManager)
        assert (manager.num_blocks, manager.free_blocks, manager.block_size) == (8, 8, BLOCK)

    def test_grows_by_whole_blocks(self) -> None:
        """A block is taken when the first token needs it, and not before."""
        manager = self.manager()
        for start, end, held in ((0, 1, 1), (1, 4, 1), (4, 5, 2), (5, 16, 4), (16, 17, 5)):
            assert manager.grow(1, start, end) is not None
            assert len(manager.blocks(1)) == held
            assert manager.free_blocks == 8 - held
            manager.check_integrity()

    def test_tells_how_the_table_changed(self) -> None:
        """Whoever follows the updates has the table."""
        manager, table = self.manager(), list[int]()
        for start, end in ((0, 6), (6, 7), (7, 20)):
            update = manager.grow(1, start, end)
            assert update is not None and update.moves == ()
            table[update.start :] = update.blocks
            assert table == list(manager.blocks(1))

    def test_refuses_what_does_not_fit_and_changes_nothing(self) -> None:
        """None, and the request holds what it held."""
        manager = self.manager()
        manager.grow(1, 0, 20)
        before = list(manager.blocks(1))
        assert manager.grow(1, 20, 33) is None
        assert manager.grow(2, 0, 13) is None
        assert (list(manager.blocks(1)), list(manager.blocks(2)), manager.free_blocks) == (before, [], 3)
        assert manager.grow(1, 20, 32) is not None
        manager.check_integrity()

    def test_release_gives_back_and_may_be_repeated(self) -> None:
        """Unknown ids are ignored."""
        manager = self.manager()
        manager.grow(1, 0, 20)
        for _ in range(2):
            manager.release(1)
            assert manager.free_blocks == 8
            assert list(manager.blocks(1)) == []
        manager.check_integrity()

    def test_a_fork_shares_and_a_write_separates(self) -> None:
        """Copy-on-write: the first to write gets a copy, the last one writes in place."""
        manager = self.manager()
        manager.grow(1, 0, 6)
        manager.fork(1, 2, 6)
        assert list(manager.blocks(2)) == list(manager.blocks(1))
        assert manager.free_blocks == 6
        update = manager.grow(2, 6, 7)
        assert update is not None
        assert update.moves == (Move(manager.blocks(1)[1], manager.blocks(2)[1]),)
        assert (update.start, update.blocks) == (1, tuple(manager.blocks(2)[1:]))
        alone = manager.grow(1, 6, 7)
        assert alone is not None and alone.moves == ()
        assert manager.blocks(1)[0] == manager.blocks(2)[0]
        manager.check_integrity()

    def test_a_shared_block_without_kv_to_keep_is_not_copied(self) -> None:
        """Where the write begins at the block's first token a fresh block will do."""
        manager = self.manager()
        manager.grow(1, 0, 8)
        manager.fork(1, 2, 8)
        update = manager.grow(2, 4, 6)
        assert update is not None and update.moves == ()
        assert manager.blocks(1)[1] != manager.blocks(2)[1]
        manager.check_integrity()

    def test_a_parent_may_end_before_its_child(self) -> None:
        """Shared blocks stay with whoever is left."""
        manager = self.manager()
        manager.grow(1, 0, 8)
        manager.fork(1, 2, 7)
        manager.release(1)
        assert manager.free_blocks == 6
        manager.release(2)
        assert manager.free_blocks == 8
        manager.check_integrity()

    def test_foretells_what_a_release_frees(self) -> None:
        """Blocks that others hold too stay where they are."""
        manager = self.manager()
        manager.grow(1, 0, 9)
        assert (manager.release_effect(1).num_freed, manager.release_effect(1).num_kept) == (3, 0)
        manager.fork(1, 2, 8)
        assert manager.release_effect(1).num_freed == 1
        assert manager.release_effect(2).num_freed == 0
        assert manager.release_effect(99).num_freed == 0

    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize("window", [None, 5])
    @pytest.mark.parametrize("seed", range(6))
    def test_nobody_ever_reads_the_kv_of_another(self, seed: int, window: int | None, caching: bool) -> None:
        """Random life of a pool: each request's table holds all of its own that it can see, at every step."""
        attention = replace(SMALL_ATTENTION, windows=(window,))
        num_blocks = 9 if window else 16  # so that there is too little of it now and then
        context = make_context(num_blocks=num_blocks, attention=attention, enable_prefix_caching=caching)
        life = _RandomLife(self.build(context), context, random.Random(seed))
        for _ in range(400):
            life.step()
        assert life.num_grown > 100 and life.num_refused > 0
        life.end()


class _RandomLife:
    """Requests that come, grow, fork and go at random over a shadow pool."""

    def __init__(self, manager: KVManager, context: BuildContext, draw: random.Random) -> None:
        self.manager, self.cache, self.draw = manager, context.prefix_cache, draw
        self.pool = ShadowPool(manager.num_blocks, manager.block_size)
        self.reach = context.model.attention.reach
        self.live: dict[int, Request] = {}
        self.begun: dict[int, int] = {}
        self.last_id = self.num_grown = self.num_refused = 0

    def step(self) -> None:
        acts = [self._begin, self._fork] if len(self.live) < 6 else [self._release]
        act = self.draw.choice([*acts, *[self._grow] * 3]) if self.live else self._begin
        act()
        self.manager.check_integrity()
        for request in self.live.values():
            values, end = history(request.token_ids), request.num_computed
            seen = 0 if self.reach is None else max(0, end - self.reach + 1)
            self.pool.check(self.manager.blocks(request.id), values, end, seen)

    def end(self) -> None:
        for request_id in list(self.live):
            self.manager.release(request_id)
        self.manager.check_integrity()
        assert self.manager.free_blocks == self.manager.num_blocks

    def _begin(self) -> None:
        tokens = [self.draw.randrange(2) for _ in range(self.draw.randint(1, 30))]
        request = self._new(tokens, 0)
        match = self.cache.match(request)
        self.manager.adopt(request.id, match.blocks)
        request.num_computed = match.num_tokens

    def _grow(self) -> None:
        request = self.draw.choice(list(self.live.values()))
        if request.owed == 0:
            request.token_ids.append(self.draw.randrange(2))
        start = request.num_computed
        end = start + self.draw.randint(1, request.owed)
        update = self.manager.grow(request.id, start, end)
        self.begun[request.id] = start
        if update is None:
            self.num_refused += 1
            return
        self.num_grown += 1
        self.pool.move(update.moves)
        self.pool.write(self.manager.blocks(request.id), history(request.token_ids), start, end)
        request.num_computed = end
        self.cache.insert(request, self.manager.blocks(request.id), end)

    def _fork(self) -> None:
        parent = self.draw.choice(list(self.live.values()))
        if parent.num_computed:
            shared = self.draw.randint(max(1, self.begun.get(parent.id, 0)), parent.num_computed)
            child = self._new([*parent.token_ids[:shared], self.draw.randrange(2)], shared)
            self.manager.fork(parent.id, child.id, shared)
            self.begun[child.id] = shared

    def _release(self) -> None:
        request = self.live.pop(self.draw.choice(list(self.live)))
        effect, free = self.manager.release_effect(request.id), self.manager.free_blocks
        self.manager.release(request.id)
        self.cache.forget(request.id)
        assert self.manager.free_blocks == free + effect.num_freed
        size = self.manager.block_size
        kept = min(effect.num_kept, (request.num_tokens - 1) // size * size)
        assert self.cache.match(request).num_tokens >= kept
        self.cache.forget(request.id)

    def _new(self, tokens: list[int], num_computed: int) -> Request:
        self.last_id += 1
        request = Request(
            self.last_id, tokens, len(tokens), SamplingParams(), 0, 10_000, num_computed=num_computed
        )
        self.live[request.id] = request
        return request
