from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loadgen.latency import Arrival, Trace, duration_s, percentile, spread_ms, summarise


def trace(sent_s: float, *arrivals: tuple[float, int], error: str | None = None) -> Trace:
    return Trace(sent_s, tuple(Arrival(at_s, count) for at_s, count in arrivals), error=error)


def test_percentiles_interpolate_between_the_nearest_values():
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0], 100) == 4.0
    assert percentile([7.0], 99) == 7.0
    assert percentile([float(n) for n in range(101)], 99) == 99.0


def test_there_is_no_percentile_of_nothing():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    assert spread_ms([]) is None


@given(st.lists(st.floats(0, 1e3), min_size=1), st.floats(0, 100))
def test_a_percentile_lies_within_its_values_and_does_not_depend_on_their_order(values, rank):
    found = percentile(values, rank)
    assert min(values) - 1e-9 <= found <= max(values) + 1e-9
    assert found == percentile(sorted(values, reverse=True), rank)


def test_ttft_tpot_and_gaps_of_one_request():
    seen = trace(10.0, (10.5, 1), (10.6, 1), (10.9, 2))
    assert seen.ttft_s == pytest.approx(0.5)
    assert seen.tpot_s == pytest.approx(0.4 / 3)
    assert seen.gaps() == pytest.approx([0.1, 0.3])
    assert seen.total_s == pytest.approx(0.9)
    assert seen.num_tokens == 4


def test_a_request_without_tokens_has_no_latencies():
    seen = trace(1.0, error="refused")
    assert (seen.ttft_s, seen.tpot_s, seen.total_s, seen.gaps()) == (None, None, None, [])


def test_a_request_with_one_response_has_no_tpot():
    assert trace(0.0, (1.0, 5)).tpot_s is None


def test_gaps_of_a_window_are_those_that_overlap_it():
    seen = trace(0.0, (1.0, 1), (2.0, 1), (5.0, 1), (6.0, 1))
    assert seen.gaps(2.5, 4.0) == [3.0], "a gap that spans the window belongs to it"
    assert seen.gaps(2.0, 5.0) == [3.0], "gaps that only touch it do not"
    assert seen.gaps(5.5, 9.0) == [1.0]


def test_a_summary_counts_errors_and_measures_from_first_request_to_last_token():
    traces = [trace(0.0, (1.0, 1), (2.0, 1)), trace(0.5, (1.5, 1), (4.0, 1)), trace(3.0, error="no")]
    summary = summarise(traces)
    assert duration_s(traces) == 4.0
    assert (summary["requests"], summary["errors"], summary["output_tokens"]) == (3, 1, 4)
    assert summary["tokens_per_s"] == 1.0
    assert summary["ttft_ms"]["p50"] == 1000.0
    assert summary["itl_ms"]["max"] == 2500.0


def test_a_summary_of_failures_alone_divides_by_nothing():
    summary = summarise([trace(0.0, error="no")])
    assert summary["tokens_per_s"] == 0.0
    assert summary["ttft_ms"] is None
