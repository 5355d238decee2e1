"""The hash cache where its hash fails it, and what it gives up first."""

from __future__ import annotations

from conch.testing.prefix_cache import request
from conch_plugins.prefix_caches.hash import HashPrefixCache
from conch_plugins.prefix_caches.trail import blake2b_hash


def depth_hash(parent, tokens):
    """Every block of a depth collides with every other."""
    return bytes([(parent[0] + 1) % 256])


def collide(parent, tokens):
    return b"same"


def offer(cache, request_id, tokens, blocks, size=2):
    cache.insert(request(request_id, tokens), blocks, len(blocks) * size)


def match(cache, tokens, request_id=99):
    try:
        return list(cache.match(request(request_id, [*tokens, 0])).blocks)
    finally:
        cache.forget(request_id)


def test_a_collision_is_a_miss():
    cache = HashPrefixCache(2, "weights", collide)
    offer(cache, 1, [1, 1, 2, 2], [10, 11])
    offer(cache, 2, [5, 5, 2, 2], [20, 21])
    assert match(cache, [1, 1]) == [10]
    assert match(cache, [5, 5, 2, 2]) == []


def test_equal_tokens_behind_a_colliding_prefix_are_not_shared():
    cache = HashPrefixCache(2, "weights", depth_hash)
    offer(cache, 1, [1, 1, 2, 2], [10, 11])
    assert cache.keep(11) and cache.keep(10)
    cache.reuse(11)
    assert cache.evict(1) == [10]
    offer(cache, 2, [5, 5], [20])
    assert match(cache, [5, 5]) == [20]
    assert match(cache, [5, 5, 2, 2]) == [20]


def orphan(cache):
    """Leave block 13, behind [1, 1] and [2, 2], cached without the two blocks before it."""
    offer(cache, 1, [1, 1, 2, 2], [10, 11])
    offer(cache, 2, [1, 1, 2, 2, 3, 3], [20, 21, 13])
    assert cache.keep(11) and cache.keep(10)
    assert cache.evict(5) == [11, 10]
    assert match(cache, [1, 1, 2, 2, 3, 3]) == []


def test_a_block_is_found_again_when_its_prefix_comes_back():
    for block_hash in (blake2b_hash, depth_hash):
        cache = HashPrefixCache(2, "weights", block_hash)
        orphan(cache)
        offer(cache, 3, [1, 1, 2, 2], [30, 31])
        assert match(cache, [1, 1, 2, 2, 3, 3]) == [30, 31, 13]


def test_a_block_is_not_found_when_another_prefix_comes_in_its_place():
    cache = HashPrefixCache(2, "weights", depth_hash)
    orphan(cache)
    offer(cache, 3, [7, 7, 2, 2], [30, 31])
    assert match(cache, [7, 7, 2, 2]) == [30, 31]
    assert match(cache, [7, 7, 2, 2, 3, 3]) == [30, 31]


def test_other_weights_hash_otherwise():
    digests = {next(iter(filled("one")._by_digest)), next(iter(filled("two")._by_digest))}
    assert len(digests) == 2


def filled(fingerprint):
    cache = HashPrefixCache(2, fingerprint)
    offer(cache, 1, [1, 1], [10])
    return cache


def test_each_block_is_hashed_once():
    calls = []

    def counting(parent, tokens):
        calls.append(tokens)
        return blake2b_hash(parent, tokens)

    cache, live = HashPrefixCache(2, "weights", counting), request(1, list(range(100)))
    for _ in range(5):
        cache.match(live)
    for computed in range(1, 101):
        cache.insert(live, range(50), computed)
    assert len(calls) == 50


def test_the_least_recently_used_goes_first():
    cache = HashPrefixCache(2, "weights")
    offer(cache, 1, [1, 1], [10])
    offer(cache, 2, [2, 2], [20])
    offer(cache, 3, [3, 3], [30])
    for block in (10, 20, 30):
        assert cache.keep(block)
    cache.reuse(10)
    assert cache.keep(10)
    assert [cache.evict(1), cache.evict(2)] == [[20], [30, 10]]
