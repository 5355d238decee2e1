"""Deadlines are kept for those who live, however far away they are."""

from __future__ import annotations

from conch.api import SamplingParams
from conch.api.request import Request
from conch.engine.deadlines import Deadlines


def request(request_id, deadline_s):
    return Request(request_id, [1], 1, SamplingParams(), 0, 2, deadline_s=deadline_s)


def test_those_who_have_ended_take_no_memory():
    deadlines = Deadlines()
    waiting = request(0, 500.0)
    deadlines.add(waiting)
    for request_id in range(1, 5000):
        ended = request(request_id, 1e9 - request_id)
        deadlines.add(ended)
        deadlines.forget(ended)
        assert len(deadlines) < 200
    assert deadlines.due(499.0) == []
    assert deadlines.due(500.0) == [0]
