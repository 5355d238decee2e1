"""Who has which expert, and what a load makes of that."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from conch.model.mesh.experts.load import LoadCounter
from conch.model.mesh.experts.placement import Placement


@st.composite
def placements(draw):
    experts = draw(st.integers(2, 12))
    parts = draw(st.integers(1, min(4, experts)))
    return Placement.first(experts, draw(st.integers(0, experts * (parts - 1))), parts)


def check(placement):
    assert set(placement.slots) == set(range(placement.num_experts))
    assert placement.bounds[-1] == len(placement.slots)


@given(st.data())
def test_a_better_placement_has_every_expert_and_as_many_slots(data):
    placement = data.draw(placements())
    check(placement)
    for _ in range(3):
        load = data.draw(
            st.lists(st.integers(0, 1 << 40), min_size=placement.num_experts, max_size=placement.num_experts)
        )
        found = placement.balanced(load)
        check(found)
        assert list(map(len, found.parts)) == list(map(len, placement.parts))
        assert found is placement or found.imbalance(load) < placement.imbalance(load)
        for old, new in zip(placement.parts, found.parts, strict=True):  # who stays keeps the slot
            stays = [slot for slot, expert in enumerate(old) if new[slot] == expert]
            kept = sum(min(old.count(expert), new.count(expert)) for expert in set(old))
            assert len(stays) == kept
        placement = found


@given(placements(), st.integers(1, 40), st.integers(0, 3))
def test_tokens_go_to_slots_of_their_experts_in_turn(placement, tokens, offset):
    chosen = torch.randint(
        placement.num_experts, (tokens, 2), generator=torch.Generator().manual_seed(tokens)
    )
    slots = placement.slots_of(chosen, offset)
    assert torch.equal(torch.tensor(placement.slots)[slots], chosen)
    one = placement.slots_of(torch.zeros(tokens, 1, dtype=torch.int64), offset).flatten()
    counts = torch.bincount(one, minlength=len(placement.slots))[placement.table[0].unique()]
    assert counts.max() - counts.min() <= 1


def test_a_hot_expert_is_shared():
    placement = Placement.first(8, 2, 2)
    load = [100, 100, 100, 0, 0, 0, 0, 0]
    assert placement.imbalance(load) > 1.3
    assert placement.balanced(load).imbalance(load) == 1.0


def test_a_load_that_is_even_moves_nothing():
    placement = Placement.first(8, 0, 4)
    assert placement.balanced([5] * 8) is placement
    assert placement.balanced([0] * 8) is placement


def test_load_is_counted_by_expert_and_by_part():
    placement = Placement.first(4, 2, 2)  # 0 1 2 | 3 0 1
    counter = LoadCounter([placement, placement], window=10)
    assert counter.imbalance == 0.0
    counter.count(0, torch.tensor([1, 2, 3, 4, 5, 6]))
    counter.end_step()
    counter.end_step()
    assert counter.tokens.tolist() == [[6, 8, 3, 4], [0, 0, 0, 0]]
    assert abs(counter.imbalance - 15 / 10.5) < 1e-3
    report = counter.report([3, 4], counter.tokens)
    assert (report.layers, report.tokens) == ((3, 4), ((6, 8, 3, 4), (0, 0, 0, 0)))
    before = counter.recent(0)
    for _ in range(10):
        counter.end_step()
    assert all(0.3 < late / early < 0.45 for early, late in zip(before, counter.recent(0), strict=True))
