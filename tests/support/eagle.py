"""Tiny EAGLE heads in the layouts that are published, random or made to be right."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from support.tiny import tiny_checkpoint, tiny_root

HIDDEN, INNER, HEADS, KV_HEADS, SIZE = 48, 64, 4, 2, 16
_WIDE, _NARROW = HEADS * SIZE, KV_HEADS * SIZE


def eagle3_tensors(*, vocab: int = 320, drafted: int = 200, states: int = 2, seed: int = 5) -> dict:
    """Return the tensors of a random head with a vocabulary of its own."""
    make = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make) / shape[-1] ** 0.5

    chosen = torch.randperm(vocab, generator=make)[:drafted].sort().values
    return {
        "fc.weight": random(HIDDEN, states * HIDDEN),
        **_layer("midlayer", 2 * HIDDEN, random),
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": 4 * random(drafted, HIDDEN),
        "d2t": chosen - torch.arange(drafted),
        "t2d": torch.isin(torch.arange(vocab), chosen),
    }


def eagle1_tensors(*, seed: int = 6) -> dict:
    """Return the tensors of a random head that shares the target's embedding and output head."""
    make = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make) / shape[-1] ** 0.5

    return {
        "fc.weight": random(HIDDEN, 2 * HIDDEN),
        "fc.bias": 0.1 * random(HIDDEN),
        **_layer("layers.0", HIDDEN, random),
    }


def _layer(name: str, into: int, random) -> dict:
    return {
        f"{name}.self_attn.q_proj.weight": random(_WIDE, into),
        f"{name}.self_attn.k_proj.weight": random(_NARROW, into),
        f"{name}.self_attn.v_proj.weight": random(_NARROW, into),
        f"{name}.self_attn.o_proj.weight": random(HIDDEN, _WIDE),
        f"{name}.mlp.gate_proj.weight": random(INNER, HIDDEN),
        f"{name}.mlp.up_proj.weight": random(INNER, HIDDEN),
        f"{name}.mlp.down_proj.weight": random(HIDDEN, INNER),
        f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN),
    }


def eagle3_config(**changes) -> dict:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": SIZE,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]},
        **changes,
    }


def eagle1_config(**changes) -> dict:
    config = {**eagle3_config(**changes), "architectures": ["LlamaForCausalLMEagle"]}
    del config["eagle_config"]
    return config


def memoryless_checkpoint() -> Path:
    """Return a model whose layers add nothing: its next token is a function of the last one alone."""
    source = tiny_checkpoint("llama")
    folder = tiny_root() / "memoryless-1"
    if not folder.is_dir():
        scratch = Path(tempfile.mkdtemp(dir=tiny_root()))
        shutil.copytree(source, scratch, dirs_exist_ok=True)
        weights = load_file(source / "model.safetensors")
        for name, tensor in weights.items():
            if "o_proj" in name or "down_proj" in name:
                tensor.zero_()
        weights["model.norm.weight"].fill_(1.0)
        save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
        scratch.rename(folder)
    return folder


def knowing_tensors() -> dict:
    """Return an EAGLE-1 head that is always right about a memoryless model: it hands on the embedding."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in eagle1_tensors().items()}
    tensors["fc.weight"] = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    return tensors


def write_head(tensors: dict, config: dict) -> Path:
    """Write a checkpoint once; returns its folder."""
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=8)
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    folder = tiny_root() / f"eagle-{digest.hexdigest()}"
    if not folder.is_dir():
        scratch = Path(tempfile.mkdtemp(dir=tiny_root()))
        save_file(
            {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
            scratch / "model.safetensors",
        )
        (scratch / "config.json").write_text(json.dumps(config))
        scratch.rename(folder)
    return folder
