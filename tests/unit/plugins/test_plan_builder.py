"""What a plan builder keeps for a policy that changes its mind."""

from __future__ import annotations

from conch.api import PlanBuilder
from conch.testing import Simulation, make_context
from conch_plugins.schedulers.fcfs import FcfsScheduler


def forked():
    """Two choices that share a block, the second about to write to it."""
    context = make_context()
    simulation = Simulation(FcfsScheduler(context), context)
    simulation.add([1, 2, 3], max_tokens=4, choices=2)
    simulation.step()
    first, second = simulation.running
    return simulation, PlanBuilder.for_context(context)(simulation), first, second


def test_a_preempted_request_takes_row_and_admission_with_it():
    simulation, builder, first, second = forked()
    assert builder.pay(second)
    tokens, seats = builder.tokens_left, builder.seats_left
    assert builder.pay(first)
    builder.preempt(second)
    assert builder.tokens_left == tokens
    assert builder.seats_left == seats + 1
    plan = builder.build()
    assert [row.request_id for row in plan.rows] == [first.id]
    assert (plan.preempted, plan.admitted) == ((second.id,), ())
    assert not simulation.context.kv_manager.blocks(second.id)


def test_a_fork_is_told_to_the_workers_with_its_first_row():
    simulation, builder, _, second = forked()
    builder.pay_all(simulation.running)
    plan = builder.build()
    (admission,) = plan.admitted
    row = next(row for row in plan.rows if row.request_id == second.id)
    assert admission.request_id == second.id
    assert (row.blocks_from, row.blocks) == (0, tuple(simulation.context.kv_manager.blocks(second.id)))
    assert len(plan.moves) == 1


def test_a_failed_admission_changes_nothing():
    simulation, builder, _, _ = forked()
    manager = simulation.context.kv_manager
    large = simulation.add(range(255), max_tokens=1)
    free, tokens, seats = manager.free_blocks, builder.tokens_left, builder.seats_left
    manager.grow(99, 0, 4)
    assert not builder.admit(large)
    manager.release(99)
    assert (manager.free_blocks, builder.tokens_left, builder.seats_left) == (free, tokens, seats)
    manager.check_integrity()


def test_most_bounds_a_row():
    simulation, builder, first, _ = forked()
    waiting = simulation.add(range(50, 60), max_tokens=1)
    assert builder.pay(first, most=0)
    assert builder.admit(waiting, most=3)
    (row,) = builder.build().rows
    assert (row.request_id, row.count, row.samples) == (waiting.id, 3, False)
