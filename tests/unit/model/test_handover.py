"""What stages hand on: states whole, ahead of who asks for them, and whose time was whose."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from conch.api.mesh import MeshShape, Seat
from conch.engine.mesh.meeting import Meeting
from conch.model.mesh import handover
from conch.model.mesh.group import MeshGroup

STAGES = 3
MOST, WIDTH = 6, 5


@pytest.fixture
def stages():
    """The ends of a pipeline of three, in this process."""
    shape = MeshShape(pipeline=STAGES)
    seats = [Seat(rank, shape, 20.0) for rank in range(STAGES)]
    meeting = Meeting("127.0.0.1")
    with ThreadPoolExecutor(STAGES) as pool:
        groups = list(pool.map(MeshGroup, seats, [meeting] * STAGES))
    for group in groups:
        group.handover.expect(MOST, WIDTH, torch.bfloat16)
    yield [group.handover for group in reversed(groups)]
    for group in groups:
        group.close()


def test_states_of_any_size_arrive_in_order_though_nobody_asks_yet(stages):
    first, second, _ = stages
    torch.manual_seed(0)
    sent = [torch.randn(count, WIDTH).bfloat16() for count in (1, MOST, 3, 2, MOST, 1, 4)]
    for number, states in enumerate(sent):
        first.send(states)
        if number >= STAGES - 1:  # as many are under way as there are stages
            before = sent[number - STAGES + 1]
            assert torch.equal(second.take(len(before)), before)
    for before in sent[-STAGES + 1 :]:
        assert torch.equal(second.take(len(before)), before)
    assert first.bytes_sent == sum(states.nbytes for states in sent)


@pytest.fixture
def passes(monkeypatch):
    """Let time pass, which otherwise stands still."""
    now_s = [100.0]
    monkeypatch.setattr(handover, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))

    def let_pass(seconds):
        now_s[0] += seconds

    return let_pass


def test_every_stage_hears_what_those_before_have_computed(stages, passes):
    states = torch.ones(2, WIDTH, dtype=torch.bfloat16)
    first, second, last = stages
    for _ in range(2):
        first.clock.begin()
        passes(2)
        first.send(states)
        second.clock.begin()
        second.send(second.take(2))
        passes(1)  # in which it sends, say
        last.clock.begin()
        last.take(2)
        passes(4)
        assert last.clock.read() == (2, 0, 4)


def test_a_stage_does_not_count_what_it_waited(passes):
    clock = handover.StageClock(2)
    clock.begin()
    passes(5)
    clock.hear((0.5, 0.25), 3)
    passes(1)
    assert clock.read() == (0.5, 0.25, 3)
    clock.begin()
    assert clock.read() == (0, 0, 0)
