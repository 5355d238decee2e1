"""The mesh with ranks that only listen."""

from __future__ import annotations

from typing import ClassVar

import pytest

from conch.api import Arena, ConchError, StepPlan
from conch.api.mesh import MeshError, MeshShape, RankJoined, RankReady, Seat
from conch.testing import ListeningRanks, ParallelismContract
from conch.testing.parallelism import RecordingWorker, a_plan
from conch_plugins.parallelism.mesh import Mesh, build_mesh


class TestTensorParallel(ParallelismContract):
    settings: ClassVar = {"tensor_parallel_size": 4}

    def build(self, context):
        return build_mesh(context)


class TestPipelineParallel(TestTensorParallel):
    settings: ClassVar = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


class TestExpertParallel(TestTensorParallel):
    settings: ClassVar = {"tensor_parallel_size": 2, "expert_parallel_size": 2}


def mesh_of(ranks, tensor=2, pipeline=1):
    return Mesh(MeshShape(tensor, pipeline), ranks, timeout_s=5.0)


def test_every_rank_gets_every_plan_and_what_was_sampled_before_it():
    ranks = ListeningRanks(RecordingWorker)
    mesh = mesh_of(ranks, tensor=3)
    for count in (4, 5):
        mesh.collect(mesh.submit(a_plan(count)))
    for link in ranks.links:
        assert [order.plan for order in link.orders] == [a_plan(4), a_plan(5)]
        assert [order.learned for order in link.orders] == [(), ((1, (4,)),)]
    mesh.close()
    assert [link.ended for link in ranks.links] == [1, 1]


def test_stages_are_the_depth_and_the_first_ranks_are_the_last_stage():
    ranks = ListeningRanks(RecordingWorker)
    mesh = mesh_of(ranks, tensor=2, pipeline=3)
    assert mesh.depth == 3
    mesh.close()
    seats = [Seat(0, ranks.links[0].seat.shape, 1.0), *(link.seat for link in ranks.links)]
    assert [(seat.stage, seat.part) for seat in seats] == [(2, 0), (2, 1), (1, 0), (1, 1), (0, 0), (0, 1)]
    assert [seat.is_last_stage for seat in seats] == [True, True, False, False, False, False]


def test_parts_of_the_experts_are_between_parts_of_a_layer_and_stages():
    shape = MeshShape(tensor=2, pipeline=2, expert=2)
    seats = [Seat(rank, shape, 1.0) for rank in range(shape.size)]
    places = [(seat.stage, seat.expert_part, seat.part) for seat in seats]
    assert places == [(s, e, t) for s in (1, 0) for e in (0, 1) for t in (0, 1)]


class Odd(ListeningRanks):
    """Ranks of which the last one says something else."""

    def __init__(self, *news):
        super().__init__(RecordingWorker)
        self._news = list(news)

    def start(self, seat):
        link = super().start(seat)
        if seat.rank == seat.shape.size - 1:
            link.news = self._news
        return link


def test_missing_ranks_are_named():
    ranks = Odd()
    with pytest.raises(MeshError, match=r"2 of 3 ranks have joined .*5\); missing: 2 \(nowhere\)"):
        mesh_of(ranks, tensor=3)
    assert [link.ended for link in ranks.links] == [1, 1]


class Lossy(ListeningRanks):
    """Ranks of which one is lost; sending to them tells only that."""

    def find_loss(self):
        return "rank 1 of the mesh fell asleep"


def test_what_fails_is_blamed_on_the_rank_that_is_lost():
    mesh = mesh_of(Lossy(RecordingWorker))
    ticket = mesh.submit(StepPlan((), preempted=(13,)))
    with pytest.raises(MeshError, match="rank 1 of the mesh fell asleep"):
        mesh.collect(ticket)
    mesh.close()


def test_the_smallest_pool_counts():
    mesh = mesh_of(Odd(RankJoined(), RankReady(5, (0, 1, 2, 3))))
    assert mesh.num_blocks == 5
    assert [mesh.num_slots(arena) for arena in Arena] == [0, 1, 2, 3]
    mesh.close()


def test_a_closed_mesh_takes_no_steps():
    mesh = mesh_of(ListeningRanks(RecordingWorker))
    mesh.close()
    with pytest.raises(ConchError, match="closed"):
        mesh.submit(a_plan(1))
