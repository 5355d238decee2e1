"""Evicted blocks go to the host's memory, then to its disk, and come back; nobody ever reads wrong KV.

The simulation writes a number for every token that stands for all tokens before it, moves blocks between
arenas as the plans say, and checks what each row reads. Some writes to the disk fail and leave garbage.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conch.api import Arena, Match, Move
from conch.testing import ShadowPool, Simulation, make_context
from conch.testing.prefix_cache import request
from conch_plugins.kv_managers.paged import PagedKVManager
from conch_plugins.prefix_caches.hash import HashPrefixCache
from conch_plugins.prefix_caches.radix import RadixPrefixCache
from conch_plugins.schedulers.fcfs import FcfsScheduler

BLOCK = 4
CACHES = {"hash": HashPrefixCache, "radix": RadixPrefixCache}


class FailingPool(ShadowPool):
    """Some writes to the disk fail, and leave nobody's tokens."""

    def __init__(self, num_blocks, draw, failures):
        super().__init__(num_blocks, BLOCK)
        self.draw, self.failures = draw, failures
        self.num_failed = 0

    def move(self, moves):
        failed = []
        for index, move in enumerate(moves):
            super().move([move])
            if move.target_arena is Arena.DISK and self.draw.random() < self.failures:
                self._slot(Arena.DISK, move.target)[:] = [-1] * BLOCK
                failed.append(index)
        self.num_failed += len(failed)
        return tuple(failed)


def simulation_of(name, num_blocks, slots, draw=None, failures=0.0):
    context = make_context(num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=24)
    cache = CACHES[name](BLOCK, "weights", slots=slots)
    manager = PagedKVManager(num_blocks, BLOCK, cache)
    context = context.with_prefix_cache(cache).with_kv_manager(manager)
    simulation = Simulation(FcfsScheduler(context), context)
    simulation.pool = FailingPool(num_blocks, draw or random.Random(0), failures)
    return simulation, cache


@pytest.mark.parametrize("name", CACHES)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    host=st.integers(0, 8),
    disk=st.integers(0, 12),
    failures=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_random_traffic_reads_only_its_own(name, seed, host, disk, failures):
    draw = random.Random(seed)
    slots = {arena: range(count) for arena, count in ((Arena.HOST, host), (Arena.DISK, disk)) if count}
    simulation, cache = simulation_of(name, 14, slots, draw, failures)
    for _ in range(25):
        prompt = [draw.randrange(2) for _ in range(draw.randint(1, 30))]
        salt = draw.choice(["", "", "s"])
        simulation.add(prompt, draw.randint(1, 8), choices=draw.choice([1, 1, 2]), salt=salt)
        for _ in range(draw.randint(0, 4)):
            simulation.step()
    simulation.run()
    simulation.check_idle()
    stats = cache.stats()
    assert stats.host_blocks <= host and stats.disk_blocks <= disk
    assert stats.disk_hits == 0 or failures < 1
    check_slots(cache, host, disk)


def check_slots(cache, host, disk):
    """Each slot is free, or in use once."""
    for tier, count in zip(cache._tiers._levels, [count for count in (host, disk) if count], strict=True):
        assert sorted([*tier._free, *tier._slots.values()]) == list(range(count))
        assert not tier._on_the_way


@pytest.mark.parametrize("name", CACHES)
def test_what_was_evicted_comes_back_tier_by_tier(name):
    simulation, cache = simulation_of(name, 8, {Arena.HOST: range(8), Arena.DISK: range(12)})
    prompts = [[number] * 25 for number in range(1, 4)]
    for prompt in [*prompts, prompts[1], *prompts]:
        simulation.add(prompt, max_tokens=1)
        simulation.run()
    stats = cache.stats()
    assert stats.host_hits > 0 and stats.disk_hits > 0
    kinds = {(move.source_arena, move.target_arena) for plan in simulation.plans for move in plan.moves}
    assert {
        (Arena.DEVICE, Arena.HOST),
        (Arena.HOST, Arena.DISK),
        (Arena.DISK, Arena.DEVICE),
        (Arena.HOST, Arena.DEVICE),
    } <= kinds
    cached = [tokens for plan in simulation.plans for tokens in plan.cached.values()]
    assert cached[:3] == [0, 0, 0] and sum(cached) >= stats.host_hits + stats.disk_hits
    simulation.check_idle()


@pytest.mark.parametrize("name", CACHES)
def test_salts_share_no_tier(name):
    simulation, cache = simulation_of(name, 8, {Arena.HOST: range(40)})
    for salt in ("a", "b", "a", "", "b"):
        simulation.add([7] * 25, max_tokens=1, salt=salt)
        simulation.run()
    cached = [tokens for plan in simulation.plans for tokens in plan.cached.values()]
    assert cached == [0, 0, 24, 0, 24] and cache.stats().host_hits > 0


def kept(name, slots, count=3):
    """Return a cache of one request's blocks, none with a user."""
    cache = CACHES[name](BLOCK, "weights", slots=slots)
    cache.insert(request(1, list(range(BLOCK * count))), list(range(count)), BLOCK * count)
    for block in reversed(range(count)):
        cache.keep(block)
    cache.forget(1)
    return cache


@pytest.mark.parametrize("name", CACHES)
def test_a_copy_below_is_made_once(name):
    cache = kept(name, {Arena.HOST: range(8)})
    assert cache.evict(3) == [2, 1, 0]
    out = (
        Move(2, 0, target_arena=Arena.HOST),
        Move(1, 1, target_arena=Arena.HOST),
        Move(0, 2, target_arena=Arena.HOST),
    )
    assert cache.take_moves() == out and cache.take_moves() == ()
    reader = request(2, list(range(13)))
    assert cache.match(reader) == Match((), 0, 12)
    assert cache.restore(reader, [5, 6, 7, 8], 0) == 12
    assert cache.take_moves() == tuple(
        Move(slot, block, source_arena=Arena.HOST) for slot, block in ((2, 5), (1, 6), (0, 7))
    )
    assert cache.match(reader) == Match((5, 6, 7), 12)
    for block in (7, 6, 5):
        assert cache.keep(block)
    assert len(cache.evict(3)) == 3 and cache.take_moves() == ()


@pytest.mark.parametrize("name", CACHES)
def test_what_the_disk_refused_is_a_miss(name):
    cache = kept(name, {Arena.DISK: range(8)})
    cache.evict(3)
    moves = cache.take_moves()
    reader = request(2, list(range(13)))
    assert cache.match(reader) == Match(), "it is not known yet whether it has arrived"
    cache.end_step(moves, (1,))
    assert cache.match(reader) == Match((), 0, 4)
    assert cache.restore(reader, [5, 6, 7, 8], 0) == 4
    assert cache.stats().disk_blocks == 2


@pytest.mark.parametrize("name", CACHES)
def test_what_cannot_be_trusted_is_forgotten_below_too(name):
    cache = kept(name, {Arena.HOST: range(8)})
    cache.evict(3)
    reader = request(2, list(range(13)))
    cache.restore(reader, [5, 6, 7, 8], 0)
    cache.discard([5, 6, 7, 8])
    assert cache.match(reader) == Match() and cache.stats().host_blocks == 0
