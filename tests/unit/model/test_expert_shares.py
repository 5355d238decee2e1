"""What each rank loads of a model with experts is its part of what transformers loads."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conch.api import CheckpointError, ConfigError, EngineConfig
from conch.api.experts import EPLBConfig
from conch.api.mesh import MeshShape, Seat
from conch.model.describe import describe
from conch.model.mesh.cut import cut_model
from conch.model.mesh.split import part_of
from conch.model.mesh.weights import fill
from support.tiny import tiny_checkpoint

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3")


def shares(folder, shape, **settings):
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        tensor_parallel_size=shape.tensor,
        pipeline_parallel_size=shape.pipeline,
        expert_parallel_size=shape.expert,
        **settings,
    )
    description = describe(folder, config)
    for rank in range(shape.size):
        seat = Seat(rank, shape, 1.0)
        layers = part_of(description.spec.num_layers, shape.pipeline, seat.stage)
        share = cut_model(description, seat, layers, config)
        fill(share, description, lambda stage, fraction: None)
        yield seat, share


def taken(whole, source):
    """Return the part of a tensor that a source names."""
    for dim, ranges in source.cuts.items():
        whole = torch.cat([whole.narrow(dim, first, last - first) for first, last in ranges], dim=dim)
    return whole


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "shape", [MeshShape(2, 1, 1), MeshShape(1, 1, 3), MeshShape(3, 1, 2), MeshShape(2, 2, 2)]
)
def test_every_rank_has_its_part(family, shape):
    heads = (
        {} if shape.tensor < 3 else {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}
    )
    folder = tiny_checkpoint(family, vocab_size=101, **heads)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    elements = 0
    for seat, share in shares(folder, shape):
        tensors = share.module.state_dict()
        assert tensors.keys() == share.sources.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, taken(whole[share.sources[name].name], share.sources[name])), name
        stacks = [tensor for name, tensor in tensors.items() if ".experts." in name and tensor.dim() == 3]
        elements += sum(tensor.numel() for tensor in stacks)
        parts = [own.placement.parts[seat.expert_part] for own in share.experts]
        assert all(len(stack) in map(len, parts) for stack in stacks)
    stacked = [tensor for name, tensor in whole.items() if ".experts." in name and tensor.dim() == 3]
    assert elements == sum(tensor.numel() for tensor in stacked), "every expert is loaded once"


def test_redundant_experts_are_loaded_twice():
    folder = tiny_checkpoint("mixtral", vocab_size=101)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    eplb = EPLBConfig(num_redundant_experts=2)
    held = []
    for _, share in shares(folder, MeshShape(1, 1, 2), eplb_config=eplb):
        down = share.module.state_dict()["model.layers.0.mlp.experts.down_proj"]
        experts = whole["model.layers.0.mlp.experts.down_proj"]
        held.append([next(e for e in range(4) if torch.equal(own, experts[e])) for own in down])
    assert held == [[0, 1, 2], [3, 0, 1]]


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        ("experts.1.w3.weight", None, r"lacks parameter .*mlp\.experts\.gate_up_proj, entry 1"),
        ("experts.1.w2.weight", "experts.1.w2.bias", r"holds parameter .*w2\.bias, which the model lacks"),
        ("experts.1.w2.weight", "experts.7.w2.weight", r"holds parameter .*experts\.7\.w2"),
    ],
)
def test_experts_that_do_not_fit_are_refused(tmp_path, name, changed, reason):
    folder = shutil.copytree(tiny_checkpoint("mixtral", vocab_size=101), tmp_path / "odd")
    weights = load_file(folder / "model.safetensors")
    full = f"model.layers.1.block_sparse_moe.{name}"
    weight = weights.pop(full)
    if changed is not None:
        weights[full.replace(name, changed)] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=reason):
        list(shares(folder, MeshShape(1, 1, 2)))


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("llama", {}, "expert_parallel_size 2: LlamaModel has no experts"),
        ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}, "is more than the 1 experts"),
        ("mixtral", {}, "num_redundant_experts 5 is more than"),
    ],
)
def test_what_cannot_be_divided_is_refused(family, settings, reason):
    eplb = EPLBConfig(num_redundant_experts=5)
    with pytest.raises(ConfigError, match=reason):
        list(shares(tiny_checkpoint(family, **settings), MeshShape(1, 1, 2), eplb_config=eplb))


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match="eplb_config"):
        EngineConfig(model="m", tensor_parallel_size=2, eplb_config=EPLBConfig())
    with pytest.raises(ConfigError, match="step_interval"):
        EPLBConfig(step_interval=0)
    with pytest.raises(ConfigError, match="num_redundant_experts"):
        EPLBConfig(num_redundant_experts=-1)
    with pytest.raises(ConfigError, match=r"quantization.*expert_parallel_size 2"):
        EngineConfig(model="m", expert_parallel_size=2, quantization="int8")
    with pytest.raises(ConfigError, match="'single' is one rank; expert_parallel_size 2"):
        EngineConfig(model="m", expert_parallel_size=2, parallelism="single")
