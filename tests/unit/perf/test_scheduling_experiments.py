from __future__ import annotations

import time

import pytest

pytest.importorskip("tritonclient.grpc")

import bench_scheduling
from arrivals_worker import Arrival, Ledger, Player, prompt_of
from chat_worker import answer as play_chats
from loadgen import report
from scheduling_experiments import fairness, hit_rate, planning_cost, slo_attainment, zero_hit_cost
from simulated_clock import SimulatedClock

from conch.api import Admission, Row, SamplingParams, StepPlan


def line(heavy: tuple[int, int, int], light: tuple[int, int, int]) -> fairness.Line:
    return {fairness.HEAVY: list(heavy), fairness.LIGHT: list(light)}


def test_service_differs_by_the_range_of_what_one_is_ahead_while_both_wait():
    ledger = [
        {fairness.HEAVY: [900, 0, 9]},  # the other one has not come
        line((900, 0, 9), (0, 0, 3)),
        line((900, 0, 8), (100, 50, 2)),  # 200 for light
        line((1000, 100, 7), (100, 50, 2)),  # 300 for heavy
        line((1000, 100, 7), (5000, 0, 0)),  # light waits no more: not counted
    ]
    assert fairness.service_gap(ledger) == 300


def test_stretches_in_which_both_wait_are_looked_at_one_by_one():
    ledger = [
        line((0, 0, 1), (0, 0, 1)),
        line((10, 0, 1), (0, 0, 1)),
        line((500, 0, 1), (0, 0, 0)),
        line((500, 0, 1), (0, 0, 1)),
        line((520, 0, 1), (0, 0, 1)),
    ]
    assert fairness.service_gap(ledger) == 20
    with pytest.raises(ValueError, match="never"):
        fairness.service_gap([line((0, 0, 1), (0, 0, 0))])


def test_the_bound_is_that_of_the_paper():
    assert fairness.bound() == 2 * 2 * 16 * 640
    sent = fairness.arrivals(5)
    assert sum(one["tenant"] == fairness.HEAVY for one in sent) == 50
    assert sum(one["tenant"] == fairness.LIGHT for one in sent) == 5


def test_a_request_is_in_time_when_both_targets_are_met():
    wish = {"ttft_target_s": 1.0, "tpot_target_s": 0.1}
    served = [
        {"ttft_s": 0.5, "tpot_s": 0.1},
        {"ttft_s": 0.5, "tpot_s": 0.2},
        {"ttft_s": 1.5, "tpot_s": 0.1},
        {"ttft_s": 1.5, "tpot_s": 0.2},
    ]
    assert slo_attainment.shares([wish] * 4, served) == {"ttft": 0.5, "tpot": 0.5, "both": 0.25}


def test_a_higher_load_is_the_same_requests_in_less_time():
    low, high = (slo_attainment.arrivals(load, 50, seed=1) for load in (0.5, 1.0))
    assert [one["prompt"] for one in low] == [one["prompt"] for one in high]
    assert low[-1]["at_s"] == pytest.approx(2 * high[-1]["at_s"])
    found = {"slo": {"0.5": {"both": 1.0}}, "fcfs": {"0.5": {"both": 0.5}}}
    assert slo_attainment.by_load(found, "both") == {"0.5": {"slo": 1.0, "fcfs": 0.5}}


def planning(median: float, hits: int = 10, preemptions: int = 0) -> dict[str, object]:
    spread = {"median": median}
    return {
        "decode_us_per_row": spread,
        "counts": {"hit_tokens": hits, "preemptions": preemptions},
    }


def test_planning_is_compared_within_a_round():
    answers = {
        "conch": {64: [planning(2.0), planning(9.0), planning(3.0)]},
        "vllm": {64: [planning(10.0), planning(30.0), planning(10.0)]},
    }
    planning_cost.check_same_work(answers)
    assert planning_cost.by_rows(answers["conch"], "decode_us_per_row") == {"64": 3.0}
    assert planning_cost.ratios(answers, "decode_us_per_row") == {"64": 0.3}


def test_programs_that_served_different_work_are_not_compared():
    with pytest.raises(RuntimeError, match="different work"):
        planning_cost.check_same_work({"conch": {64: [planning(2.0)]}, "vllm": {64: [planning(2.0, hits=9)]}})
    with pytest.raises(RuntimeError, match="preempted"):
        planning_cost.check_same_work({"conch": {64: [planning(2.0, preemptions=1)]}})


def test_what_a_cache_costs_is_the_median_of_its_rounds():
    assert zero_hit_cost.cost([99.0, 50.0, 100.0], [100.0, 100.0, 100.0]) == 0.99
    assert hit_rate.over({"hash": {"found": 98, "oracle": 100}}, "oracle") == {"hash": 0.98}


def test_figures_of_a_table_carry_the_keys_that_lead_to_them():
    assert report.flat(0.5) == [("", 0.5)]
    assert report.flat({"0.5": {"slo": 1.0, "fcfs": None}}) == [
        ("0.5 slo", 1.0),
        ("0.5 fcfs", None),
    ]


def test_the_ledger_counts_a_prompt_once_and_outputs_as_they_come():
    ledger = Ledger({1: "a", 2: "b"})
    admission = Admission(1, (5, 6, 7), 3, SamplingParams(), 0, 10)
    ledger.see(StepPlan((Row(1, 0, 2, False, (), 0, ()),), (admission,)))
    ledger.see(StepPlan((Row(1, 2, 1, True, (), 0, ()),), (admission,)))  # again, as after a preemption
    assert (ledger.prompt["a"], ledger.output["a"], ledger.admitted["a"]) == (3, 1, 1)
    assert prompt_of(1, 4) == prompt_of(1, 9)[:4] != prompt_of(2, 4)


class Usage:
    ttft_s, total_s, num_output = 0.5, 2.5, 5


class Output:
    failure, usage = None, Usage

    def __init__(self, request_id: int) -> None:
        self.request_id = request_id


class OneByOne:
    """Serves one request a step, each of which takes a second."""

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock
        self._queue: list[int] = []
        self.began: list[tuple[int, float]] = []

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def add(self, message: int) -> None:
        self._queue.append(message)

    def step(self) -> list[Output]:
        self.began.append((self._queue[0], self._clock.now()))
        self._clock.advance(1.0)
        return [Output(self._queue.pop(0))]


def test_arrivals_come_at_their_time_and_nobody_waits_for_those_to_come():
    clock = SimulatedClock()
    engine = OneByOne(clock)
    arrivals = [Arrival(at_s, 1, 1, "a", None, None) for at_s in (5.0, 0.0, 0.5)]
    found = Player(engine, clock, lambda number, _: number, Ledger({})).play(arrivals, first_id=7)
    assert [number for number, _ in engine.began] == [8, 9, 7]
    starts = [at_s for _, at_s in engine.began]
    assert starts[1] - starts[0] == pytest.approx(1.0)
    assert starts[2] - starts[0] == pytest.approx(5.0)
    assert found["served"] == [{"ttft_s": 0.5, "tpot_s": 0.5}] * 3


def test_a_simulated_clock_moves_only_when_told(monkeypatch):
    monkeypatch.setattr(time, "monotonic", time.monotonic)
    monkeypatch.setattr(time, "perf_counter", time.perf_counter)
    clock = SimulatedClock().install()
    before = time.monotonic()
    clock.advance(2.0)
    clock.wait_until(0.0)
    assert time.monotonic() - before == time.perf_counter() - before == 2.0


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_a_cache_finds_what_an_oracle_would_but_for_the_last_block(cache):
    settings = {**hit_rate.SETTINGS, "prefix_cache": cache, "num_gpu_blocks_override": 4_000}
    sums = play_chats({"settings": settings, "chats": 8, "at_once": 4, "seed": 2})
    assert sums["requests"] > 8
    assert sums["oracle_in_blocks"] <= sums["found"] <= sums["oracle"] < sums["prompt"]


def test_the_plot_is_drawn_beside_the_result(tmp_path):
    pytest.importorskip("matplotlib")
    shares = {"ttft": 1.0, "tpot": 0.5, "both": 0.5}
    loads = {scheduler: {"0.5": shares, "1.0": shares} for scheduler in slo_attainment.SCHEDULERS}
    result = {"slo_attainment": {"details": {"simulated": loads, "real": {"slo": {"0.5": shares}}}}}
    assert bench_scheduling.draw(result, tmp_path / "one.json") is None
    assert (tmp_path / "one-attainment.png").stat().st_size > 1_000
    assert bench_scheduling.draw({}, tmp_path / "two.json") is None
