"""What every parallelism promises, of one rank or of many that only listen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from conch.api import Arena, BuildContext, Parallelism, Row, RowResult, StepPlan, StepResult
from conch.testing.context import SMALL_ATTENTION, make_context
from conch.testing.ranks import ListeningRanks


class RecordingWorker:
    """Answers each row with its count; fails where a plan preempts request 13."""

    num_blocks = 21

    def __init__(self) -> None:
        self.closed = 0
        self.plans: list[StepPlan] = []

    def num_slots(self, arena: Arena) -> int:
        """Return a number for each arena."""
        return 7 * arena

    def execute(self, plan: StepPlan) -> StepResult:
        """Answer."""
        if 13 in plan.preempted:
            raise ValueError("unlucky plan")
        self.plans.append(plan)
        return StepResult(tuple(RowResult(row.request_id, (row.count,)) for row in plan.rows))

    def close(self) -> None:
        """Count."""
        self.closed += 1


def a_plan(count: int) -> StepPlan:
    """Return a plan of one row that is known again by its count."""
    return StepPlan((Row(1, 0, count, True, (), 0, (0,)),))


class ParallelismContract:
    """Inherit, implement `build`, and let pytest collect the subclass."""

    settings: ClassVar[Mapping[str, Any]] = {}
    """Keys of `EngineConfig`, such as the sizes of a mesh."""

    def build(self, context: BuildContext) -> Parallelism:
        """Build the parallelism under test; its worker comes from `context.worker_factory` or `ranks`."""
        raise NotImplementedError

    def start(self) -> tuple[Parallelism, RecordingWorker]:
        """Return the parallelism under test and the worker that it built."""
        built: list[RecordingWorker] = []

        def factory() -> RecordingWorker:
            built.append(RecordingWorker())
            return built[-1]

        attention = dataclasses.replace(SMALL_ATTENTION, windows=(None,) * 4)
        context = make_context(attention=attention, **self.settings).with_worker_factory(factory)
        parallelism = self.build(context.with_ranks(ListeningRanks(factory)))
        assert len(built) == 1, "one worker for this process"
        return parallelism, built[0]

    def test_is_a_parallelism(self) -> None:
        """It has the methods of the seam and knows the pool."""
        parallelism, worker = self.start()
        assert isinstance(parallelism, Parallelism)
        assert parallelism.depth >= 1
        assert parallelism.num_blocks == worker.num_blocks
        assert all(parallelism.num_slots(arena) == worker.num_slots(arena) for arena in Arena)
        parallelism.close()

    def test_steps_run_in_order(self) -> None:
        """As many as may be in flight; each ticket brings its own result."""
        parallelism, worker = self.start()
        for first in range(1, 20, parallelism.depth):
            counts = range(first, first + parallelism.depth)
            tickets = [parallelism.submit(a_plan(count)) for count in counts]
            assert len(set(tickets)) == len(tickets)
            for ticket, count in zip(tickets, counts, strict=True):
                assert parallelism.collect(ticket).rows == (RowResult(1, (count,)),)
        ran = [plan.rows[0].count for plan in worker.plans]
        assert ran == sorted(ran) and len(ran) >= 19
        parallelism.close()

    def test_an_error_rises_where_the_result_was_expected(self) -> None:
        """`submit` takes the plan, `collect` raises, and `close` works after that."""
        parallelism, worker = self.start()
        ticket = parallelism.submit(StepPlan((), preempted=(13,)))
        with pytest.raises(Exception, match="unlucky plan"):
            parallelism.collect(ticket)
        parallelism.close()
        assert worker.closed == 1

    def test_close_may_be_repeated_with_a_step_in_flight(self) -> None:
        """The worker is closed once."""
        parallelism, worker = self.start()
        parallelism.submit(a_plan(1))
        for _ in range(2):
            parallelism.close()
        assert worker.closed == 1
