from __future__ import annotations

import pytest

pytest.importorskip("tritonclient.grpc")

import predictions
from parallel_experiments import routing, traffic
from traffic_worker import orders_of, start


def test_bytes_are_compared_over_all_kinds():
    one = {"counted": {"reduced": 30, "sent": 3}, "formula": {"reduced": 20, "sent": 2}}
    assert traffic.over(one) == 1.5


def test_requests_are_served_to_their_end():
    orders = orders_of(requests=2, prompt=20, outputs=3)
    assert [order.plan.num_tokens for order in orders] == [40, 2, 2]
    assert [len(order.learned) for order in orders] == [0, 2, 2]
    assert [row.start for row in orders[-1].plan.rows] == [21, 21]
    assert len({block for row in orders[0].plan.rows for block in row.blocks}) == 4


def test_ranks_say_what_the_formula_says():
    _, answer = start({})
    asked = {"requests": 2, "prompt": 5, "outputs": 2, "settings": traffic.TOPOLOGIES["tp2"]}
    found = answer(asked)
    assert found["ranks"] == 2 and traffic.over(found) == 1.0


def test_the_largest_imbalance_is_of_what_can_be_even():
    by_trace = {trace: {"imbalance": 0.1, "hit_rate": 0.5} for trace in routing.TRACES}
    uneven = {**by_trace, "every_fourth_long": {"imbalance": 9.0, "hit_rate": 0.5}}
    found = {"2": {router: uneven for router in routing.ROUTERS}}
    assert routing.largest_imbalance(found) == 0.1
    assert routing.hit_rates(found, "round_robin") == {"2": 0.5}


def test_predictions_are_told_of_the_rank_that_has_most():
    ranks = [
        {"weight_bytes": 17e9, "bytes_per_token": {"all-reduce": 2e6, "send": 0}},
        {"weight_bytes": 18e9, "bytes_per_token": {"all-reduce": 2e6, "send": 1e5}},
    ]
    decode = {
        "1": {"ms_per_token": 10.04, "tokens_per_s": 99.6, "fits": True},
        "256": {"ms_per_token": 20.0, "tokens_per_s": 12800.0, "fits": False},
    }
    predicted = {"kv_tokens": 1234567, "prompt_s": 0.127, "decode": decode}
    shown = predictions.cells({"ranks": ranks, "predicted": predicted})
    assert shown == ["18", "1,234,567", "2,100", "127", "10.0 / 100", "does not fit"]


def test_predicted_models_are_configs_only():
    found = sorted(path.name for path in predictions.MODELS.glob("*/*"))
    assert found == ["config.json"] * len({model for *_, model, _ in predictions.ROWS})
