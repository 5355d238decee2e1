from __future__ import annotations

from parallel_experiments.pipeline import figures_of, headline_of, medians


def test_the_slowest_stage_is_measured_against_the_time_that_passed():
    run = {"seconds": 10.0, "tokens": 500, "steps": 100, "stages_s": [6.0, 9.0]}
    assert figures_of(run) == {
        "tokens_per_s": 50.0,
        "step_ms": 100.0,
        "utilisation_of_ideal": 0.9,
        "bubble_fraction": 0.25,
        "stage_0_busy": 0.6,
        "stage_1_busy": 0.9,
    }
    assert figures_of({**run, "stages_s": []}) == {"tokens_per_s": 50.0, "step_ms": 100.0}


def test_the_headline_is_of_medians():
    runs = {
        str(count): [
            figures_of({"seconds": 1.0, "tokens": 1, "steps": 1, "stages_s": [busy, busy / 2]})
            for busy in (0.1, count / 10, 1.0)
        ]
        for count in (1, 2, 4, 8)
    }
    found = headline_of({count: medians(each) for count, each in runs.items()})
    assert found["pp2_utilisation_of_ideal_8"] == 0.8
    assert found["bubble_fraction"] == {"1": 0.925, "2": 0.85, "4": 0.7, "8": 0.4}
