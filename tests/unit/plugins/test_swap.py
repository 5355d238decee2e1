"""Preempted requests that leave their KV in the host's memory, over a simulated model and every scheduler."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conch.api import Arena, ConfigError, EngineConfig
from conch.api.parking import HostParking, NoParking, make_parking
from conch.api.victims import LastAdmitted, LeastLoss
from conch.engine.catalogue import Catalogue
from conch.testing import Simulation, make_context
from conch.testing.context import SMALL_ATTENTION
from conch.testing.simulation import expected

CATALOGUE = Catalogue.load()
SCHEDULERS = CATALOGUE.names("scheduler")
WINDOWED = replace(SMALL_ATTENTION, windows=(10,))


def simulate(scheduler="fcfs", num_blocks=16, num_drafts=0, attention=SMALL_ATTENTION, **config):
    """Simulate; a byte of swap space holds a block."""
    context = make_context(num_blocks=num_blocks, attention=attention, **config)
    if context.config.prefix_cache == "radix" and context.config.enable_prefix_caching:
        context = context.with_prefix_cache(CATALOGUE.factory("prefix_cache", "radix")(context))
        context = context.with_kv_manager(CATALOGUE.factory("kv_manager", "paged")(context))
    return Simulation(CATALOGUE.factory("scheduler", scheduler)(context), context, num_drafts)


def swapped(simulation):
    """Blocks moved out and in."""
    moves = [move for plan in simulation.plans for move in plan.moves]
    out = sum(move.target_arena is Arena.SWAP for move in moves)
    return out, sum(move.source_arena is Arena.SWAP for move in moves)


def computed(simulation):
    return sum(plan.num_tokens for plan in simulation.plans)


def check_ended(simulation):
    simulation.check_idle()
    for request in simulation.ended:
        prompt, output = request.token_ids[: request.num_prompt], request.token_ids[request.num_prompt :]
        assert output == expected(prompt, len(output), request.seed, request.cache_salt)


def test_what_was_parked_is_not_computed_again():
    simulation = simulate(
        num_blocks=12,
        preemption_mode="swap",
        swap_space_bytes=20,
        enable_prefix_caching=False,
        max_num_seqs=4,
    )
    requests = [simulation.add([number, number], max_tokens=40) for number in range(4)]
    simulation.run()
    check_ended(simulation)
    out, back = swapped(simulation)
    assert out == back > 0
    assert sum(len(plan.preempted) for plan in simulation.plans) > 0
    assert computed(simulation) == sum(request.num_tokens - 1 for request in requests)


def test_a_full_host_pool_means_computing_again():
    simulation = simulate(
        num_blocks=12, preemption_mode="swap", swap_space_bytes=4, enable_prefix_caching=False, max_num_seqs=4
    )
    requests = [simulation.add([number, number], max_tokens=40) for number in range(4)]
    simulation.run()
    check_ended(simulation)
    preemptions = sum(len(plan.preempted) for plan in simulation.plans)
    kept = sum(len(plan.kept) for plan in simulation.plans)
    assert 0 < kept < preemptions
    assert computed(simulation) > sum(request.num_tokens - 1 for request in requests)


@pytest.mark.parametrize("caching", [True, False])
def test_whoever_ends_while_parked_leaves_nothing(caching):
    simulation = simulate(
        num_blocks=12, preemption_mode="swap", swap_space_bytes=20, enable_prefix_caching=caching
    )
    for number in range(4):
        simulation.add([number, number], max_tokens=40)
    parking = simulation.context.parking
    while not parking.num_used:
        simulation.step()
    parked = [request for request in simulation.waiting if request.num_computed]
    assert parked and parking.num_tokens(parked[0].id) == parked[0].num_computed
    for request in parked:
        simulation.cancel(request)
    assert parking.num_used == 0
    parking.check_integrity()
    simulation.run()
    check_ended(simulation)


def test_what_is_cached_is_not_brought_back():
    """A request that returns shares what it has in common with one that runs."""
    simulation = simulate(num_blocks=14, preemption_mode="swap", swap_space_bytes=20, max_num_seqs=2)
    for last in range(2):
        simulation.add([*range(12), last], max_tokens=31)
        simulation.step()
    simulation.run()
    check_ended(simulation)
    out, back = swapped(simulation)
    assert 0 < back < out


@given(
    seed=st.integers(0, 10_000),
    scheduler=st.sampled_from(SCHEDULERS),
    cache=st.sampled_from(["none", "hash", "radix"]),
)
@settings(max_examples=80, deadline=None)
def test_every_request_ends_right_whatever_is_swapped(seed, scheduler, cache):
    draw = random.Random(seed)
    simulation = simulate(
        scheduler,
        num_blocks=draw.randint(10, 24),
        num_drafts=draw.choice([0, 3]),
        attention=draw.choice([SMALL_ATTENTION, WINDOWED]),
        max_num_seqs=draw.randint(2, 6),
        max_num_batched_tokens=draw.randint(6, 40),
        prefix_cache=cache,
        enable_prefix_caching=cache != "none",
        preemption_mode=draw.choice(["swap", "auto"]),
        preemption_victim=draw.choice(["least_loss", "last_admitted"]),
        swap_space_bytes=draw.choice([3, 12, 100]),
        kv_watermark=draw.choice([0, 0.2]),
    )
    serve(simulation, draw)
    check_ended(simulation)


def serve(simulation, draw, count=12):
    """Let requests come at random, and some go before they end."""
    pool = simulation.context.num_blocks * simulation.context.config.block_size
    stem = [draw.randrange(1000) for _ in range(12)]
    for _ in range(count):
        prompt = stem[: draw.choice([0, 8, 12])] + [draw.randrange(1000) for _ in range(draw.randint(1, 12))]
        simulation.add(
            prompt,
            max_tokens=draw.randint(1, min(24, pool - len(prompt))),
            choices=draw.choice([1, 1, 2]),
            salt=draw.choice(["", "", "salt"]),
        )
        for _ in range(draw.randint(0, 4)):
            simulation.step()
        if draw.random() < 0.1:
            alive = [*simulation.running, *simulation.waiting]
            simulation.cancel(draw.choice(alive)) if alive else None
    simulation.run()


def test_a_window_lets_in_what_is_longer_than_the_pool():
    simulation = simulate(num_blocks=16, attention=WINDOWED, max_num_batched_tokens=16, max_num_seqs=3)
    for number in range(4):
        simulation.add([number] * 100, max_tokens=60)
    simulation.run()
    check_ended(simulation)
    assert len(simulation.ended) == 4
    assert any(len(plan.rows) > 1 for plan in simulation.plans)


def test_the_modes():
    config = EngineConfig(model="m", swap_space_bytes=100)
    assert isinstance(make_parking(config, 7), HostParking)
    assert isinstance(make_parking(config, 0), NoParking)
    assert isinstance(make_parking(EngineConfig(model="m", preemption_mode="recompute"), 7), NoParking)
    with pytest.raises(ConfigError, match="needs swap_space_bytes"):
        EngineConfig(model="m", preemption_mode="swap")
    with pytest.raises(ConfigError, match="is of no use"):
        EngineConfig(model="m", preemption_mode="recompute", swap_space_bytes=1)


def test_thrift_declines_what_is_cheaper_computed_again():
    thrifty, eager = HostParking(100, 16, is_thrifty=True), HostParking(100, 16)
    table = list(range(50))
    assert thrifty.park(1, table, 800, num_lost=10) is None
    assert thrifty.park(1, table, 800, num_lost=700) is not None
    assert eager.park(1, table, 800, num_lost=10) is not None
    assert (thrifty.num_used, eager.num_used) == (50, 50)
    assert thrifty.cost(50, 700) < 700 == thrifty.cost(60, 700), "no room for 60"


def test_names_of_the_policies():
    for name, policy in (("least_loss", LeastLoss), ("last_admitted", LastAdmitted)):
        context = make_context(preemption_victim=name)
        builder = simulate(preemption_victim=name).scheduler._begin
        assert isinstance(builder.keywords["kv"].victims, policy), context
