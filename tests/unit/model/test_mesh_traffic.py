"""The formula of what ranks tell each other, and real ranks that count it."""

from __future__ import annotations

import pytest

from conch.api import Admission, EngineConfig, Row, SamplingParams, StepPlan
from conch.api.mesh import MeshShape, RankOrder, Seat
from conch.model.mesh.traffic import Speech, Traffic, gathered_bytes, reduced_bytes, sent_bytes
from conch.testing.threaded_mesh import ThreadedMesh
from support.tiny import tiny_checkpoint


def speech(rank, tensor=1, pipeline=1, expert=1):
    seat = Seat(rank, MeshShape(tensor, pipeline, expert), 1.0)
    told = {"expert_layers": 3, "chosen": 2, "slots": 8} if expert > 1 else {}
    return Speech(seat, width=64, itemsize=2, sums=5, vocabulary=101, **told)


def test_one_rank_has_nobody_to_tell():
    assert speech(0).of_step(7, 3) == Traffic()


def test_states_are_added_up_behind_each_row_parallel_layer():
    assert reduced_bytes(7, speech(1, tensor=2)) == 7 * 64 * 2 * 5
    assert reduced_bytes(7, speech(1, pipeline=2)) == 0


def test_logits_are_padded_to_the_widest_part_and_come_from_the_last_stage():
    assert gathered_bytes(3, speech(1, tensor=2)) == 3 * 51 * 2
    assert gathered_bytes(3, speech(1, tensor=2, pipeline=2)) == 3 * 51 * 2
    assert gathered_bytes(3, speech(2, tensor=2, pipeline=2)) == 0


def test_all_but_the_last_stage_hand_states_on():
    last, first = (sent_bytes(7, speech(rank, pipeline=2)) for rank in (0, 1))
    assert (last, first) == (0, 7 * 64 * 2)


def test_parts_divide_tokens_and_send_them_to_the_experts_of_others():
    each = 4  # of 8 tokens
    for rank in (0, 1):
        said = speech(rank, expert=2).of_step(8, 2)
        assert said.exchanged == 2 * each * 2 * (1 / 2) * 64 * 2 * 3
        assert said.counted == 8 * 8 * 3
        assert said.reduced == 0
    assert reduced_bytes(8, speech(0, tensor=2, expert=2)) == each * 64 * 2 * 5


def test_parts_but_the_first_send_whole_logits():
    said = [gathered_bytes(2, speech(rank, tensor=2, expert=2)) for rank in range(4)]
    columns, whole = 51 * 2, 101 * 2
    assert said == [columns, columns, columns + whole, columns]


def test_traffic_adds_up():
    one, two = Traffic(1, 2, 3, 4, 5), Traffic(10, 20, 30, 40, 50)
    assert one + two - one == two
    assert (one + two).total == 165


def admission(request_id, count):
    return Admission(request_id, (5,) * count, count, SamplingParams(temperature=0.0, max_tokens=9), 0, 40)


ORDERS = (
    RankOrder(
        StepPlan(
            rows=(Row(1, 0, 7, False, (), 0, (0, 1)), Row(2, 0, 3, True, (), 0, (2,))),
            admitted=(admission(1, 12), admission(2, 3)),
        )
    ),
    RankOrder(
        StepPlan(rows=(Row(1, 7, 5, True, (), 2, (3,)), Row(2, 3, 3, True, (4, 4), 1, (4,)))),
        learned=((2, (9,)),),
    ),
    RankOrder(StepPlan(rows=(), finished=(1, 2))),
)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "is_tied"), [(2, 1, True), (1, 2, False), (2, 2, True), (3, 1, False)]
)
def test_real_ranks_say_what_the_formula_says(tensor, pipeline, is_tied):
    folder = tiny_checkpoint(
        "llama",
        num_attention_heads=6,
        num_key_value_heads=6,
        hidden_size=48,
        vocab_size=101,
        num_hidden_layers=3,
        tie_word_embeddings=is_tied,
    )
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        num_threads=1,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        block_size=4,
        num_gpu_blocks_override=12,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        pipeline_layers=None if pipeline == 1 else (2, 1),
    )
    with ThreadedMesh(config) as mesh:
        before = mesh.said()
        for order in ORDERS:
            mesh.execute(order)
        told = [after - start for after, start in zip(mesh.said(), before, strict=True)]
        assert told == mesh.predicted([order.plan for order in ORDERS])
    kinds = {"reduced": tensor > 1, "gathered": tensor > 1, "sent": pipeline > 1}
    for kind, is_there in kinds.items():
        assert any(getattr(one, kind) for one in told) == is_there, kind


@pytest.mark.parametrize(("tensor", "expert"), [(1, 2), (2, 2)])
def test_ranks_that_share_experts_say_together_what_the_formula_says(tensor, expert):
    folder = tiny_checkpoint("mixtral", num_attention_heads=4, num_key_value_heads=4)
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        num_threads=1,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        num_gpu_blocks_override=32,
        tensor_parallel_size=tensor,
        expert_parallel_size=expert,
    )
    params = SamplingParams(temperature=0.0, max_tokens=2)
    ids = [tuple(range(5 + 40 * each, 29 + 40 * each)) for each in range(2)]
    admitted = tuple(Admission(each, ids[each], 24, params, 0, 30) for each in range(2))
    rows = tuple(Row(each, 0, 24, True, (), 0, (2 * each, 2 * each + 1)) for each in range(2))
    plan = StepPlan(rows, admitted)
    with ThreadedMesh(config) as mesh:
        before = mesh.said()
        mesh.execute(RankOrder(plan))
        told = sum((after - start for after, start in zip(mesh.said(), before, strict=True)), Traffic())
        formula = sum(mesh.predicted([plan]), Traffic())
    exact = ("reduced", "gathered", "sent", "counted")
    assert [getattr(told, kind) for kind in exact] == [getattr(formula, kind) for kind in exact]
    assert told.counted and told.gathered
    assert told.exchanged == pytest.approx(formula.exchanged, rel=0.3), "the router is not even, but nearly"
