"""The paged manager with the hash cache."""

from __future__ import annotations

from conch.api import Move
from conch.testing import make_context
from conch.testing.prefix_cache import request


def pool(num_blocks=8):
    context = make_context(num_blocks=num_blocks)
    return context.kv_manager, context.prefix_cache


def fill(manager, cache, number, tokens):
    manager.grow(number, 0, len(tokens))
    cache.insert(request(number, tokens), manager.blocks(number), len(tokens))


def test_a_cached_block_is_not_written_to_even_by_its_only_user():
    manager, cache = pool()
    fill(manager, cache, 1, list(range(8)))
    manager.fork(1, 2, 6)
    manager.release(1)
    cached = manager.blocks(2)[1]
    update = manager.grow(2, 6, 7)
    assert update.moves == (Move(cached, manager.blocks(2)[1]),)
    assert list(cache.match(request(3, list(range(9)))).blocks) == [manager.blocks(2)[0], cached]
    manager.check_integrity()


def test_released_blocks_stay_until_they_are_needed_and_the_tail_goes_first():
    manager, cache = pool()
    fill(manager, cache, 1, list(range(16)))
    table = list(manager.blocks(1))
    manager.release(1)
    assert manager.free_blocks == 8
    manager.grow(2, 0, 4 * 6)
    assert list(cache.match(request(3, list(range(17)))).blocks) == table[:2]
    manager.check_integrity()


def test_blocks_that_were_adopted_are_not_evicted():
    manager, cache = pool()
    fill(manager, cache, 1, list(range(16)))
    manager.release(1)
    matched = list(cache.match(request(2, list(range(17)))).blocks)
    manager.adopt(2, matched)
    assert manager.free_blocks == 4
    assert manager.grow(3, 0, 17) is None
    assert manager.grow(3, 0, 16) is not None
    assert not set(matched) & set(manager.blocks(3))
    manager.check_integrity()


def test_a_leak_is_found_out():
    manager, _ = pool()
    manager.grow(1, 0, 8)
    manager._tables.pop(1)
    try:
        manager.check_integrity()
    except AssertionError as error:
        assert "1 references, 0 users" in str(error)
    else:
        raise AssertionError("the leak was not noticed")
