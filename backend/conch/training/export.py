"""A trained head as a checkpoint in the layout that EAGLE-3 heads are published in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from conch.training.head import TrainableHead

RECIPE = "recipe.json"


def write_head(
    folder: Path,
    head: TrainableHead,
    drafted: torch.Tensor,
    layers: Sequence[int],
    recipe: Mapping[str, Any],
) -> None:
    """Write config.json, model.safetensors (bf16) and the recipe.

    The rows of the output head are the target's, so they are not in the file: whoever loads it takes them
    from there.

    Parameters
    ----------
    drafted : int64 [D]
        Tokens that it drafts, rising.
    layers
        Of the target, whose input it reads.
    recipe
        How it was made; anything that JSON can hold.
    """
    shape = head.shape
    vocab_size = int(recipe["vocab_size"])
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    tensors["d2t"] = drafted - torch.arange(len(drafted))
    tensors["t2d"] = torch.isin(torch.arange(vocab_size), drafted)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "vocab_size": vocab_size,
        "draft_vocab_size": len(drafted),
        "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors.part")
    (folder / "model.safetensors.part").replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / RECIPE).write_text(json.dumps(recipe, indent=2) + "\n")
