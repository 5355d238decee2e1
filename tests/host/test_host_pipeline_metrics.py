"""What the stages of a pipeline did is on the metrics page, over the lives of all engine processes."""

from __future__ import annotations

import pytest

from conch.engine.protocol import EngineStats
from conch.host.metrics import Accounts
from conch.host.metrics_page import TritonMetricsPage
from host.host_fakes import FakePbUtils


def show(*snapshots):
    """Show each snapshot, the engine dying between them."""
    pb_utils, accounts = FakePbUtils(), Accounts()
    page = TritonMetricsPage(pb_utils, {"model": "m"}, ["m_0_0"])
    for stats in snapshots:
        accounts.engines[0].engine_down()
        accounts.engines[0].stats(stats)
        page.show(accounts.take())
    return pb_utils


def test_stages_are_told_apart_and_bubbles_are_what_they_idled():
    pb_utils = show(
        EngineStats(steps_s=4.0, stages_s=(3.0, 2.0)), EngineStats(steps_s=10.0, stages_s=(9.0, 8.0))
    )
    busy = [pb_utils.value("pipeline_stage_busy_seconds_total", stage=str(stage)) for stage in range(2)]
    assert busy == [12.0, 10.0]
    assert pb_utils.value("engine_busy_seconds_total") == 14.0
    assert pb_utils.value("pipeline_bubble_fraction") == pytest.approx(0.15)  # of the engine that lives


def test_one_rank_has_no_bubbles():
    pb_utils = show(EngineStats(steps_s=4.0))
    assert pb_utils.value("engine_busy_seconds_total") == 4.0
    assert pb_utils.value("pipeline_bubble_fraction") == 0.0
    assert pb_utils.value("pipeline_stage_busy_seconds_total", stage="0") == 0
