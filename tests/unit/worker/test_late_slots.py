from __future__ import annotations

import torch

from conch.api import Span
from conch.worker.late_slots import LateSlots


def states(*values):
    return torch.tensor(values, dtype=torch.float32)[:, None, None]


def test_slots_of_many_steps_are_a_row_for_each_request():
    late = LateSlots()
    assert not late
    late.put_off([Span(7, 10, 12, 0), Span(8, 4, 5, 0)], [0, 3], states(70.0, 71.0, -1.0, 80.0))
    late.put_off([Span(8, 5, 6, 0), Span(7, 12, 13, 0)], [0, 1], states(81.0, 72.0))
    late.put_off([Span(9, 0, 1, 0)], [0], states(90.0))
    assert late and not late.are_many
    rows, values = late.take()
    assert [(row.request_id, row.start, row.count, row.samples) for row in rows] == [
        (7, 10, 3, False),
        (8, 4, 2, False),
        (9, 0, 1, False),
    ]
    assert values.flatten().tolist() == [70.0, 71.0, 72.0, 80.0, 81.0, 90.0]
    assert not late, "what was taken is gone"


def test_a_step_without_spans_brings_no_rows():
    late = LateSlots()
    late.put_off([], [], states(1.0))
    assert late.take()[0] == []


def test_only_so_many_steps_are_put_off():
    late = LateSlots()
    steps = 0
    while not late.are_many:
        late.put_off([Span(1, steps, steps + 1, 0)], [0], states(float(steps)))
        steps += 1
    assert 1 < steps <= 16
