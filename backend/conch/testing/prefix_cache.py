"""What every prefix cache promises. A cache that remembers nothing keeps all of it."""

from __future__ import annotations

from conch.api import BuildContext, Match, Move, PrefixCache, PrefixCacheStats, Request, SamplingParams
from conch.testing.context import make_context

BLOCK = 4


def request(request_id: int, token_ids: list[int], salt: str = "") -> Request:
    """Return a request of a prompt."""
    return Request(request_id, token_ids, len(token_ids), SamplingParams(), 0, 10_000, cache_salt=salt)


class PrefixCacheContract:
    """Inherit, implement `build`, and let pytest collect the subclass."""

    def build(self, context: BuildContext) -> PrefixCache:
        """Build the prefix cache under test."""
        raise NotImplementedError

    def filled(self, token_ids: list[int], blocks: list[int], salt: str = "") -> PrefixCache:
        """Return a cache that was offered one request's blocks; none has a user any more."""
        cache = self.build(make_context())
        cache.insert(request(1, token_ids, salt), blocks, len(token_ids))
        for block in reversed(blocks):
            cache.keep(block)
        cache.forget(1)
        return cache

    def test_is_a_prefix_cache(self) -> None:
        """It has the methods of the seam, and is empty."""
        cache = self.build(make_context())
        assert isinstance(cache, PrefixCache)
        assert (cache.num_evictable, cache.evict(5)) == (0, [])
        assert cache.match(request(1, list(range(20)))) == Match()

    def test_matches_from_the_start(self) -> None:
        """What matches is a prefix of the blocks that were offered, and of the tokens."""
        cache = self.filled(list(range(12)), [7, 3, 5])
        for tokens in (
            list(range(30)),
            [*range(8), 99, 98, 97, 96],
            [*range(4), 9, 9, 9, 9],
            [9, *range(11)],
        ):
            same = next((i for i, token in enumerate(tokens) if token != i or i == 12), len(tokens))
            matched = cache.match(request(2, tokens))
            assert list(matched.blocks) == [7, 3, 5][: len(matched.blocks)]
            assert len(matched.blocks) == -(-matched.num_tokens // BLOCK) and matched.num_tokens <= same
            cache.forget(2)

    def test_a_match_in_part_gives_way_to_whole_blocks(self) -> None:
        """Without its last block, where that agrees in part only, a match is one of whole blocks."""
        cache = self.filled(list(range(12)), [7, 3, 5])
        matched = cache.match(request(2, [*range(6), 99, 99]))
        whole = matched.whole_blocks(BLOCK)
        assert whole.num_tokens == len(whole.blocks) * BLOCK == matched.num_tokens // BLOCK * BLOCK
        assert list(whole.blocks) == list(matched.blocks)[: len(whole.blocks)]

    def test_leaves_a_token_to_compute(self) -> None:
        """A match never covers the last token."""
        cache = self.filled(list(range(16)), [1, 2, 3, 4])
        for length in range(1, 17):
            matched = cache.match(request(length + 1, list(range(length))))
            assert matched.num_tokens < length and len(matched.blocks) == -(-matched.num_tokens // BLOCK)

    def test_different_salts_share_nothing(self) -> None:
        """Salts keep tenants apart."""
        cache = self.filled(list(range(12)), [1, 2, 3], salt="one")
        for number, salt in enumerate(("", "two", "one "), start=2):
            assert cache.match(request(number, list(range(12)), salt)) == Match()

    def test_insert_may_come_piece_by_piece(self) -> None:
        """Offered as they complete, blocks match as if offered at once; unfinished ones are not taken."""
        whole, cache = self.filled(list(range(15)), [1, 2, 3, 4]), self.build(make_context())
        live = request(1, list(range(15)))
        for computed in range(1, 16):
            cache.insert(live, [1, 2, 3, 4], computed)
        reader = request(2, list(range(40)))
        assert cache.match(reader) == whole.match(reader)
        assert 4 not in cache.match(reader).blocks

    def test_the_first_of_two_equal_blocks_stays(self) -> None:
        """A block is in the cache once, and the other one is not kept."""
        cache = self.build(make_context())
        cache.insert(request(1, list(range(8))), [1, 2], 8)
        cache.insert(request(2, list(range(8))), [5, 6], 8)
        assert not cache.holds(5) and not cache.keep(5) and not cache.keep(6)
        assert set(cache.match(request(3, list(range(9)))).blocks) <= {1, 2}

    def test_keeps_evicts_and_reuses(self) -> None:
        """What is kept is evictable, until it is reused or evicted."""
        cache = self.build(make_context())
        cache.insert(request(1, list(range(12))), [1, 2, 3], 12)
        kept = [block for block in (3, 2, 1) if cache.keep(block)]
        assert cache.num_evictable == len(kept)
        reused = cache.match(request(2, list(range(9))))
        for block in reused.blocks:
            cache.reuse(block)
        assert cache.num_evictable == len(kept) - len(reused.blocks)
        assert [cache.holds(block) for block in (1, 2, 3, 4)] == [block in kept for block in (1, 2, 3, 4)]
        evicted = cache.evict(10)
        assert not any(cache.holds(block) for block in evicted)
        assert sorted(evicted) == sorted(set(kept) - set(reused.blocks))
        assert cache.num_evictable == 0
        assert cache.match(request(3, list(range(13)))) == reused

    def test_evicts_no_more_than_asked(self) -> None:
        """What is evicted is never matched again."""
        cache = self.filled(list(range(16)), [1, 2, 3, 4])
        for number in range(2, 8):
            evicted = cache.evict(1)
            assert len(evicted) <= 1
            assert not set(evicted) & set(cache.match(request(number, list(range(20)))).blocks)
        assert cache.num_evictable == 0

    def test_discards_what_cannot_be_trusted(self) -> None:
        """A discarded block is not matched again, and is not kept when its user leaves."""
        cache = self.build(make_context())
        cache.insert(request(1, list(range(12))), [1, 2, 3], 12)
        cache.discard([1, 2, 3, 9])
        assert cache.match(request(2, list(range(12)))) == Match()
        assert not any(cache.keep(block) for block in (1, 2, 3))
        assert cache.num_evictable == 0

    def test_without_lower_tiers_nothing_moves_and_nothing_comes_back(self) -> None:
        """What was evicted is gone, and what is in place stays so."""
        cache = self.filled(list(range(12)), [1, 2, 3])
        cache.evict(3)
        reader = request(2, list(range(13)))
        assert cache.match(reader).num_below == 0
        assert cache.restore(reader, [4, 5, 6, 7], 0) == 0 and cache.restore(reader, [4, 5, 6, 7], 8) == 8
        assert cache.take_moves() == () and cache.stats() == PrefixCacheStats()

    def test_hears_of_steps_and_is_closed_in_the_end(self) -> None:
        """A step without moves of its own concerns it little."""
        cache = self.filled(list(range(12)), [1, 2, 3])
        found = cache.match(request(2, list(range(13))))
        cache.end_step((), ())
        cache.end_step((Move(5, 6),), ())
        assert cache.match(request(3, list(range(13)))) == found
        cache.close()
