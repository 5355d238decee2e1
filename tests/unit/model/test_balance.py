"""Layers of stages: as even as they can be, by what was measured; and the same for all ranks."""

from __future__ import annotations

from itertools import combinations, pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.api import ConfigError, EngineConfig
from conch.api.mesh import MeshShape, Seat
from conch.api.mesh_config import check_layers
from conch.model.describe import describe
from conch.model.mesh.balance import Costs, agree_on_layers, count_layers, measure_costs
from support.tiny import tiny_checkpoint


def slowest(costs, counts):
    layers, seconds = list(costs.layers), []
    for count in counts:
        seconds.append(sum(layers[:count]))
        del layers[:count]
    return max([*seconds[:-1], seconds[-1] + costs.head])


@given(
    layers=st.lists(st.floats(0.01, 10), min_size=1, max_size=8),
    head=st.floats(0, 30),
    stages=st.integers(1, 4),
)
def test_no_other_division_is_faster(layers, head, stages):
    stages = min(stages, len(layers))
    costs = Costs(tuple(layers), head)
    counts = count_layers(costs, stages)
    assert len(counts) == stages and min(counts) >= 1 and sum(counts) == len(layers)
    bounds = ([0, *cuts, len(layers)] for cuts in combinations(range(1, len(layers)), stages - 1))
    others = ([b - a for a, b in pairwise(each)] for each in bounds)
    assert slowest(costs, counts) <= min(slowest(costs, other) for other in others) * (1 + 1e-9)
    assert counts == count_layers(costs, stages)


def test_a_large_head_and_a_dear_layer_have_their_stages_almost_alone():
    assert count_layers(Costs((1.0,) * 30, 8.0), 2) == [19, 11]
    assert count_layers(Costs((9.0, 1.0, 1.0, 1.0), 1.0), 2) == [1, 3]
    assert count_layers(Costs((1.0,) * 4, 100.0), 4) == [1, 1, 1, 1]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "deepseek_v3"])
def test_every_layer_and_the_head_are_measured(family):
    folder = tiny_checkpoint(family, num_hidden_layers=3)
    costs = measure_costs(describe(folder, EngineConfig(model=str(folder), dtype="float32")))
    assert len(costs.layers) == 3
    assert min(costs.layers) > 0 and costs.head > 0


def test_layers_of_another_kind_are_measured_apart():
    folder = tiny_checkpoint("llama", num_hidden_layers=3)
    description = describe(folder, EngineConfig(model=str(folder), dtype="float32"))
    wide = describe(
        (other := tiny_checkpoint("llama", intermediate_size=4096)), EngineConfig(model=str(other))
    )
    description.meta.base_model.layers[1].mlp = wide.meta.float().base_model.layers[0].mlp
    first, second, third = measure_costs(description).layers
    assert first == third != second


def described(pipeline, rank=0):
    """A model's description and a group, both as far as they are asked."""
    folder = tiny_checkpoint("llama", num_hidden_layers=3)
    seat = Seat(rank, MeshShape(pipeline=pipeline), 1.0)
    group = SimpleNamespace(seat=seat, hear_first=lambda name, say: [2, 1])
    return describe(folder, EngineConfig(model=str(folder))), group


def test_what_the_first_rank_measures_holds_for_all_and_a_wish_is_not_measured():
    for rank, heard, wished in ((1, (0, 2), (0, 1)), (0, (2, 3), (1, 3))):
        description, group = described(2, rank)
        assert agree_on_layers(description, None, group) == heard
        assert agree_on_layers(description, (1, 2), group) == wished
    description, group = described(1)
    assert agree_on_layers(description, None, group) == (0, 3)


def test_a_model_without_stages_is_refused():
    description, group = described(2)
    description.meta.base_model.config.base_model_pp_plan = None
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no stages"):
        agree_on_layers(description, None, group)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_layers": (1, 2)}, "of no use with pipeline_parallel_size 1"),
        ({"pipeline_layers": (1, 2), "pipeline_parallel_size": 3}, r"each of the 3 stages, not \[1, 2\]"),
        ({"pipeline_layers": (0, 3), "pipeline_parallel_size": 2}, "greater than 0"),
    ],
)
def test_stages_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **settings)


def test_stages_hold_all_layers():
    spec = described(1)[0].spec
    check_layers(spec, None)
    check_layers(spec, (1, 2))
    with pytest.raises(ConfigError, match="pipeline_layers add up to 4, but the model has 3 layers"):
        check_layers(spec, (2, 2))
