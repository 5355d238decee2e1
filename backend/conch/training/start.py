"""A head before it has learnt anything: as much like the target's last layer as it can be."""

from __future__ import annotations

from typing import Any

import torch

from conch.training.head import HeadShape, TrainableHead
from conch.training.states import Target


def shape_like(config: Any, num_states: int) -> HeadShape:  # noqa: ANN401 - transformers is not typed
    """Return the sizes of the target's own layers."""
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    return HeadShape(
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rope_theta=float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))),
        eps=config.rms_norm_eps,
        num_states=num_states,
    )


def new_head(target: Target, num_states: int, seed: int) -> TrainableHead:
    """Return a head whose stream is the target's last state, with the MLP and norms of the target."""
    torch.manual_seed(seed)
    head = TrainableHead(shape_like(target.config, num_states))
    hidden = head.shape.hidden
    last = target.module.model.layers[-1]
    with torch.no_grad():
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -hidden:] += torch.eye(hidden)
        head.norm.weight.copy_(target.module.model.norm.weight)
        layer = head.midlayer
        layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).weight.copy_(getattr(last.mlp, name).weight)
    return head
