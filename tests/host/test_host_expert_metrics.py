"""What experts had to do is on the metrics page, over the lives of all engine processes."""

from __future__ import annotations

from conch.api.experts import ExpertLoad
from conch.engine.protocol import EngineStats
from conch.host.metrics import Accounts
from conch.host.metrics_page import TritonMetricsPage
from host.host_fakes import FakePbUtils


def test_tokens_of_each_expert_and_how_uneven_ranks_are():
    pb_utils, accounts = FakePbUtils(), Accounts()
    page = TritonMetricsPage(pb_utils, {"model": "m"}, ["m_0_0"])

    def tell(*loads):
        for load in loads:
            accounts.engines[0].stats(EngineStats(experts=load))
        page.show(accounts.take())

    def total(layer, expert):
        return pb_utils.value("expert_tokens_total", layer=str(layer), expert=str(expert))

    tell(ExpertLoad((1, 2), ((1, 2), (0, 3)), 1.5), ExpertLoad((1, 2), ((5, 2), (0, 7)), 1.25))
    assert [total(1, 0), total(1, 1), total(2, 1)] == [5, 2, 7]
    assert pb_utils.value("expert_load_imbalance") == 1.25
    accounts.engines[0].engine_down()
    tell(ExpertLoad((1, 2), ((1, 0), (1, 1)), 1.0))
    assert [total(1, 0), total(1, 1), total(2, 0), total(2, 1)] == [6, 2, 1, 8]


def test_a_model_without_experts_has_no_series_of_them():
    pb_utils, accounts = FakePbUtils(), Accounts()
    page = TritonMetricsPage(pb_utils, {"model": "m"}, ["m_0_0"])
    accounts.engines[0].stats(EngineStats(steps=3))
    page.show(accounts.take())
    assert pb_utils.value("expert_tokens_total") == 0
    assert pb_utils.value("expert_load_imbalance") == 0
