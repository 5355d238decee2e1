"""What speculation did is on the metrics page, over the lives of all engine processes."""

from __future__ import annotations

import pytest

from conch.engine.protocol import EngineStats
from conch.host.metrics import Accounts
from conch.host.metrics_page import TritonMetricsPage
from host.host_fakes import FakePbUtils


def test_counts_go_on_over_a_restart_and_by_position():
    pb_utils, accounts = FakePbUtils(), Accounts()
    page = TritonMetricsPage(pb_utils, {"model": "m"}, ["m_0_0"])
    first = EngineStats(
        drafts=4, drafts_proposed=10, drafts_accepted=6, accepted_by_position=(4, 2), drafting_s=0.5
    )
    accounts.engines[0].stats(first)
    page.show(accounts.take())
    accounts.engines[0].engine_down()
    second = EngineStats(
        drafts=2, drafts_proposed=6, drafts_accepted=5, accepted_by_position=(2, 2, 1), drafting_s=0.25
    )
    accounts.engines[0].stats(second)
    page.show(accounts.take())

    def total(name, **labels):
        return pb_utils.value(f"spec_decode_{name}", **labels)

    assert total("num_drafts_total") == 6
    assert total("num_draft_tokens_total") == 16
    assert total("num_accepted_tokens_total") == 11
    by_position = [total("num_accepted_tokens_per_pos_total", position=str(index)) for index in range(4)]
    assert by_position == [6, 4, 1, 0]
    assert total("drafting_seconds_total") == pytest.approx(0.75)
    assert total("mean_acceptance_length") == 3.5
