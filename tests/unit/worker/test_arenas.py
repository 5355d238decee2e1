"""Moves between arenas: batched, and yet as if made one by one."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from conch.api import Arena, Move
from conch.worker.arenas import Arenas, TensorStore, batches

SLOTS = 4
ARENAS = st.sampled_from([Arena.DEVICE, Arena.HOST, Arena.SWAP])
MOVES = st.lists(st.builds(Move, st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1), ARENAS, ARENAS))


def filled():
    """Two layers an arena; each slot holds a number of its own."""
    return {
        arena: [
            torch.arange(2 * SLOTS * 3).view(2, SLOTS, 3) + 100 * layer + 1000 * arena for layer in (0, 1)
        ]
        for arena in (Arena.DEVICE, Arena.HOST, Arena.SWAP)
    }


@given(MOVES)
def test_moves_are_made_as_if_one_by_one(moves):
    batched, single = filled(), filled()
    Arenas({arena: TensorStore(pools) for arena, pools in batched.items()}).carry_out(moves)
    for move in moves:
        for source, target in zip(single[move.source_arena], single[move.target_arena], strict=True):
            target[:, move.target] = source[:, move.source].clone()
    for arena, pools in single.items():
        assert all(torch.equal(one, other) for one, other in zip(batched[arena], pools, strict=True))


def test_moves_of_one_kind_are_one_batch():
    out = [Move(slot, slot, Arena.DEVICE, Arena.HOST) for slot in range(3)]
    copies = [Move(0, 1), Move(0, 2)]
    assert list(batches([*out, *copies])) == [out, copies]


def test_blocks_that_make_room_for_others_are_one_batch():
    down = [Move(slot, slot, Arena.HOST, Arena.DISK) for slot in range(4)]
    out = [Move(slot, slot, Arena.DEVICE, Arena.HOST) for slot in range(4)]
    mixed = [move for pair in zip(down, out, strict=True) for move in pair]
    assert list(batches(mixed)) == [down, out]
    assert list(batches([*mixed, Move(2, 9, Arena.HOST, Arena.DISK)])) == [down, out, [Move(2, 9, 1, 2)]]


def test_a_slot_that_was_written_begins_a_batch():
    first, chained, again = Move(0, 1), Move(1, 2), Move(3, 2)
    assert list(batches([first, chained, again])) == [[first], [chained], [again]]
    assert list(batches([])) == []
