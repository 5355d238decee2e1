"""A head before it has learnt anything: the best linear guess at the target's next state.

With random weights a head has to find out first that the token which came last matters most, and attention
shares it with all tokens before. So some of its heads begin by seeing their own slot alone, and what they
make of it is a regression: from the target's last state, and the token after it, to its next state. What
comes out of a slot then stands for the state of the next one, from the first step on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from conch.training.head import HeadShape, TrainableHead
from conch.training.states import Lesson, Target

_SHARPNESS = 12.0
"""Score of a slot with itself, where others' are about 0 on average."""
_RIDGE = 1e-3
_MOST_SLOTS = 40_000


def shape_like(config: Any, num_states: int) -> HeadShape:  # noqa: ANN401 - transformers is not typed
    """Return the sizes of the target's own layers, except that each query head has keys of its own.

    All that a head knows of the last token comes through the values of its attention: few KV heads would be a
    narrow door.
    """
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    return HeadShape(
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=heads,
        kv_heads=heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rope_theta=float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))),
        eps=config.rms_norm_eps,
        num_states=num_states,
    )


def new_head(target: Target, lessons: Sequence[Lesson], seed: int) -> TrainableHead:
    """Return a head that begins with what a regression over lessons says."""
    torch.manual_seed(seed)
    hidden = target.config.hidden_size
    head = TrainableHead(shape_like(target.config, lessons[0].states.shape[1] // hidden))
    last = target.module.model.layers[-1]
    with torch.no_grad():
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -hidden:] += torch.eye(hidden)
        head.norm.weight.copy_(target.module.model.norm.weight)
        layer = head.midlayer
        layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        layer.mlp.gate_proj.weight.copy_(last.mlp.gate_proj.weight)
        layer.mlp.up_proj.weight.copy_(last.mlp.up_proj.weight)
        layer.mlp.down_proj.weight.zero_()
        _begin_attention(head, _step_matrix(target, lessons, head), _importance(target))
    return head


def _begin_attention(head: TrainableHead, step: torch.Tensor, importance: torch.Tensor) -> None:
    """Let two thirds of the heads see their own slot and take the step that `step` [h, 2 h] says."""
    attention, shape = head.midlayer.self_attn, head.shape
    rank = max(1, 2 * shape.heads // 3) * shape.head_size
    left, sizes, right = torch.linalg.svd(importance[:, None] * step, full_matrices=False)
    rank = min(rank, len(sizes))
    attention.o_proj.weight.zero_()
    attention.v_proj.weight[:rank] = right[:rank]
    attention.o_proj.weight[:, :rank] = left[:, :rank] * sizes[:rank] / importance[:, None]
    deviation = (_SHARPNESS / shape.head_size**0.5 / shape.hidden) ** 0.5
    same = torch.randn(rank, shape.hidden) * deviation
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight[:rank, shape.hidden :] = 0
        projection.weight[:rank, : shape.hidden] = same


def _step_matrix(target: Target, lessons: Sequence[Lesson], head: TrainableHead) -> torch.Tensor:
    """Regress how the last state changes from token to token on the token between and the state: [h, 2 h]."""
    hidden, layer = head.shape.hidden, head.midlayer
    products, wanted = torch.zeros(2 * hidden, 2 * hidden), torch.zeros(2 * hidden, hidden)
    seen = 0
    for lesson in lessons:
        begin = max(0, lesson.num_prompt - 1)
        states = lesson.states[begin:-1, -hidden:].float()
        token_ids = lesson.token_ids[begin + 1 : -1]
        embedded = functional.embedding(token_ids, target.embedding).float()
        inputs = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(states[:-1])], dim=1)
        products += inputs.T @ inputs
        wanted += inputs.T @ (states[1:] - states[:-1])
        seen += len(inputs)
        if seen > _MOST_SLOTS:
            break
    products += _RIDGE * products.diagonal().mean() * torch.eye(2 * hidden)
    found: torch.Tensor = torch.linalg.solve(products, wanted)
    return found.T


def _importance(target: Target) -> torch.Tensor:
    """Return how much each number of the last state means to the logits: float32 [h]."""
    scale: torch.Tensor = target.module.model.norm.weight.detach().float()
    spread = (target.head.float().std(dim=0) * scale).abs()
    return spread.clamp(min=1e-3 * float(spread.max()))
