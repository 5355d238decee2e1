"""The radix cache: hits inside a block, what it gives up first, and how little it looks at twice."""

from __future__ import annotations

import pytest

from conch.api import Match, Move
from conch.testing import Simulation, make_context
from conch.testing.prefix_cache import request
from conch_plugins.kv_managers.paged import PagedKVManager
from conch_plugins.prefix_caches import radix_tree
from conch_plugins.prefix_caches.radix import RadixPrefixCache
from conch_plugins.schedulers.fcfs import FcfsScheduler

BLOCK = 4


def radix(block_size=BLOCK):
    return RadixPrefixCache(block_size, "weights")


def offer(cache, request_id, tokens, blocks, salt="", size=BLOCK):
    cache.insert(request(request_id, tokens, salt), blocks, len(blocks) * size)
    for block in reversed(blocks):
        cache.keep(block)
    cache.forget(request_id)


def match(cache, tokens, salt=""):
    try:
        return cache.match(request(99, tokens, salt))
    finally:
        cache.forget(99)


# -- hits inside a block


def test_a_hit_ends_where_the_tokens_differ():
    cache = radix()
    offer(cache, 1, list(range(12)), [7, 3, 5])
    assert match(cache, [*range(6), 99, 99, 99]) == Match((7, 3), 6)
    assert match(cache, [*range(3), 99]) == Match((7,), 3)
    assert match(cache, [*range(8), 99]) == Match((7, 3), 8)
    assert match(cache, [99, *range(11)]) == Match()


def test_a_hit_leaves_the_last_token_even_inside_a_block():
    cache = radix()
    offer(cache, 1, list(range(12)), [7, 3, 5])
    for length in range(2, 13):
        found = match(cache, list(range(length)))
        assert found.num_tokens == length - 1
        assert found.blocks == (7, 3, 5)[: -(-found.num_tokens // BLOCK)]


def test_of_several_branches_the_one_that_agrees_longest_is_copied():
    cache = radix()
    offer(cache, 1, [0, 1, 2, 3, 4, 5, 6, 7], [10, 11])
    offer(cache, 2, [0, 1, 2, 3, 4, 5, 60, 70], [10, 21])
    offer(cache, 3, [0, 1, 2, 3, 40, 50, 60, 70], [10, 31])
    assert match(cache, [0, 1, 2, 3, 4, 5, 6, 99, 99]) == Match((10, 11), 7)
    assert match(cache, [0, 1, 2, 3, 4, 5, 60, 99, 99]) == Match((10, 21), 7)
    assert match(cache, [0, 1, 2, 3, 40, 99, 99]) == Match((10, 31), 5)
    between = match(cache, [0, 1, 2, 3, 4, 5, 99, 99])
    assert between.num_tokens == 6 and between.blocks[1] in (11, 21)


def test_a_branch_that_was_evicted_is_not_copied_while_another_is_there():
    cache = radix()
    offer(cache, 1, [0, 1, 2, 3, 4, 5, 6, 7], [10, 11])
    offer(cache, 2, [0, 1, 2, 3, 4, 5, 60, 70], [10, 21])
    assert cache.evict(1) == [11]
    assert match(cache, [0, 1, 2, 3, 4, 5, 6, 7, 8]) == Match((10, 21), 6)


def test_less_than_a_quarter_of_a_block_is_not_worth_a_copy():
    cache = radix(16)
    offer(cache, 1, list(range(16)), [5], size=16)
    found = {length: match(cache, [*range(length), *[99] * 8]).num_tokens for length in range(1, 16)}
    assert found == {length: length if length >= 4 else 0 for length in range(1, 16)}


def test_salts_share_no_part_of_a_block():
    cache = radix()
    offer(cache, 1, list(range(8)), [1, 2], salt="one")
    assert match(cache, list(range(8)), "two") == Match() == match(cache, list(range(8)))
    assert match(cache, list(range(8)), "one") == Match((1, 2), 7)


def test_the_rest_of_a_hit_is_copied_before_it_is_written():
    cache = radix()
    manager = PagedKVManager(8, BLOCK, cache)
    first = request(1, list(range(8)))
    manager.grow(1, 0, 8)
    table = tuple(manager.blocks(1))
    cache.insert(first, table, 8)
    second = request(2, [0, 1, 2, 3, 4, 5, 99, 99, 99])
    found = cache.match(second)
    manager.adopt(2, found.blocks)
    update = manager.grow(2, found.num_tokens, 9)
    assert found == Match(table, 6)
    assert update.moves == (Move(table[1], manager.blocks(2)[1]),)
    assert manager.blocks(2)[0] == table[0] and manager.blocks(2)[1] not in table
    assert list(manager.blocks(1)) == list(table)
    manager.check_integrity()


def test_a_hit_inside_a_block_gives_way_where_the_pool_has_no_room_for_the_copy():
    """A request that needs every block is served though a part of one of them is cached."""
    context = make_context(num_blocks=4, prefix_cache="radix")
    cache = radix()
    manager = PagedKVManager(4, BLOCK, cache)
    context = context.with_prefix_cache(cache).with_kv_manager(manager)
    simulation = Simulation(FcfsScheduler(context), context)
    simulation.add(range(8), max_tokens=1)
    simulation.run()
    long = simulation.add([*range(6), *range(50, 59)], max_tokens=1)
    simulation.run()
    simulation.check_idle()
    assert [plan.cached[long.id] for plan in simulation.plans if long.id in plan.cached] == [4]
    assert manager.num_blocks * BLOCK == long.num_tokens


def test_hits_are_counted_in_tokens():
    context = make_context()
    cache = radix()
    manager = PagedKVManager(64, BLOCK, cache)
    context = context.with_prefix_cache(cache).with_kv_manager(manager)
    simulation = Simulation(FcfsScheduler(context), context)
    for prompt in (range(11), [*range(7), 99, 99], [*range(7), 99, 98]):
        simulation.add(prompt, max_tokens=2)
        simulation.run()
    cached = [tokens for plan in simulation.plans for tokens in plan.cached.values()]
    assert cached == [0, 7, 8]
    simulation.check_idle()


# -- what goes first


def test_the_least_recently_used_branch_goes_first_and_from_its_end():
    cache = radix()
    offer(cache, 1, list(range(12)), [1, 2, 3])
    offer(cache, 2, [*range(4), *range(50, 58)], [1, 5, 6])
    for block in (1, 2):
        cache.reuse(block)
    for block in (2, 1):
        cache.keep(block)
    assert [cache.evict(1) for _ in range(5)] == [[3], [6], [5], [2], [1]]
    assert match(cache, list(range(12))) == Match()


def test_a_block_behind_one_that_went_is_found_again_when_that_is_back():
    cache = radix()
    cache.insert(request(1, list(range(8))), [1, 2], 8)
    live = request(2, list(range(12)))
    cache.insert(live, [5, 6, 7], 12)  # the first two were cached already, as 1 and 2
    for block in (2, 1):
        cache.keep(block)
    assert cache.evict(5) == [2, 1]
    assert match(cache, list(range(12))) == Match()
    offer(cache, 3, list(range(8)), [8, 9])
    assert match(cache, list(range(13))) == Match((8, 9, 7), 12)


def test_a_request_whose_place_was_cut_off_looks_for_it_anew():
    """Its first block was another's, which went; what another one put there instead is not taken for it."""
    cache = radix()
    cache.insert(request(1, list(range(8))), [1, 2], 8)
    live = request(2, list(range(16)))
    cache.insert(live, [5, 6], 8)
    for block in (2, 1):
        cache.keep(block)
    assert cache.evict(1) == [2]
    offer(cache, 3, [*range(4), *range(50, 58)], [1, 8, 9])
    cache.insert(live, [5, 6, 7], 12)
    assert match(cache, list(range(13))) == Match((1, 6, 7), 12)
    assert match(cache, [*range(4), *range(50, 59)]) == Match((1, 8, 9), 12)


# -- costs


@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
def test_what_is_inserted_piece_by_piece_is_walked_once(chunk, monkeypatch):
    looked_at = 0
    common = radix_tree._common

    def counting(run, offset, data, depth, count):
        nonlocal looked_at
        looked_at += count
        return common(run, offset, data, depth, count)

    monkeypatch.setattr(radix_tree, "_common", counting)
    cache, live = radix(), request(1, list(range(1024)))
    for computed in range(chunk, 1025, chunk):
        cache.insert(live, range(256), computed)
    assert looked_at == 0, "a request alone in the tree has nothing to compare"
    other = request(2, list(range(1024)))
    assert cache.match(other).num_tokens >= 1020
    for computed in range(chunk, 1025, chunk):
        cache.insert(other, range(256, 512), computed)
    assert looked_at < 3 * 1024 * 4
