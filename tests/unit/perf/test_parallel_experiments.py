from __future__ import annotations

import pytest

pytest.importorskip("tritonclient.grpc")

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
