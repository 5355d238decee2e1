from __future__ import annotations

import asyncio
from collections import Counter

import pytest

pytest.importorskip("tritonclient.grpc")

from loadgen.latency import Arrival, Trace
from serving_experiments.bench import ratio_of_medians
from serving_experiments.chunked_prefill import Gate, Observation
from serving_experiments.kv_waste import waste
from serving_experiments.static_batching import workload


def at(sent_s: float, *times: float) -> Trace:
    return Trace(sent_s, tuple(Arrival(time, 1) for time in times))


def test_a_ratio_is_that_of_the_medians_not_of_the_means():
    assert ratio_of_medians([1.0, 2.0, 300.0], [4.0, 4.0, 4.0]) == 0.5


def test_gaps_are_quiet_before_the_first_long_prompt_and_busy_during_each_prefill():
    stream = at(0.0, 1.0, 1.1, 1.2, 1.3, 2.5, 2.6, 2.7, 4.7, 4.8)
    seen = Observation([stream], [at(1.35, 2.4), at(2.75, 4.0, 4.5)])
    assert seen.quiet_gaps(from_s=1.05) == pytest.approx([0.1, 0.1])
    assert seen.busy_gaps() == pytest.approx([1.2, 2.0])
    assert seen.timeline()[0] == (-0.25, 100.0)


def test_the_gate_opens_when_the_slowest_stream_is_there():
    async def scene() -> list[bool]:
        gate, seen = Gate(2, 3), []
        for index, tokens in ((0, 2), (0, 5), (1, 2), (1, 1)):
            gate.watch(index, Arrival(0.0, tokens))
            seen.append(gate.opened.is_set())
        return seen

    assert asyncio.run(scene()) == [False, False, False, True]


def test_waste_is_the_share_that_holds_nothing():
    assert waste(allocated=200, used=150) == 0.25
    for allocated, used in ((0, 0), (10, 11), (10, -1)):
        with pytest.raises(ValueError, match="token slots"):
            waste(allocated, used)


def test_a_workload_has_each_length_equally_often_in_an_order_of_its_own():
    requests = workload(16, (20, 100, 300, 500), seed=1)
    assert Counter(request["max_tokens"] for request in requests) == {20: 4, 100: 4, 300: 4, 500: 4}
    assert requests == workload(16, (20, 100, 300, 500), seed=1)
    assert requests != workload(16, (20, 100, 300, 500), seed=2)
    assert [request["max_tokens"] for request in requests] != [20, 100, 300, 500] * 4
