"""The single worker after its end."""

from __future__ import annotations

import pytest

from conch.api import ConchError
from conch.testing.parallelism import RecordingWorker, a_plan
from conch_plugins.parallelism.single import SingleWorker


def test_a_closed_worker_takes_no_steps():
    parallelism = SingleWorker(RecordingWorker)
    ticket = parallelism.submit(a_plan(1))
    parallelism.close()
    with pytest.raises(ConchError, match="closed"):
        parallelism.submit(a_plan(1))
    with pytest.raises(ConchError, match="closed"):
        parallelism.collect(ticket)
    assert parallelism.num_blocks == RecordingWorker.num_blocks


def test_a_worker_that_cannot_be_built_says_so_at_once():
    def factory():
        raise MemoryError("no room for the weights")

    with pytest.raises(MemoryError, match="no room"):
        SingleWorker(factory)


def test_tickets_are_collected_in_order():
    parallelism = SingleWorker(RecordingWorker)
    parallelism.submit(a_plan(1))
    second = parallelism.submit(a_plan(2))
    with pytest.raises(AssertionError, match="before ticket"):
        parallelism.collect(second)
