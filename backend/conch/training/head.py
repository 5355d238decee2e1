"""An EAGLE-3 head as training sees it: whole sequences, several drafts deep.

At slot i the head sees the target's states at token i and the embedding of token i + 1, and says what token
i + 2 is. While drafting it has to do with its own output of the slot before in place of the states. Training
does the same ("training-time test": Li et al., "EAGLE-3", 2025): depth d runs each slot as if it were the
d-th of a draft. Such a slot sees the states' keys and values of the slots before its draft, and those that
earlier depths have made of the slots of the draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head.

    Attributes
    ----------
    hidden, inner, heads, kv_heads, head_size, rope_theta, eps
        As the target's, as a rule.
    num_states
        Layers of the target whose states are read.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    rope_theta: float
    eps: float
    num_states: int = 3


class _Norm(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise in fp32: there is no fast way for half of it."""
        return super().forward(x.float())


class _Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        result: torch.Tensor = self.down_proj(gated)
        return result


class _Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        wide, narrow = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.q_proj = nn.Linear(2 * shape.hidden, wide, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)


class _Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = _Norm(shape.hidden, shape.eps)
        self.hidden_norm = _Norm(shape.hidden, shape.eps)
        self.post_attention_layernorm = _Norm(shape.hidden, shape.eps)
        self.self_attn = _Attention(shape)
        self.mlp = _Mlp(shape.hidden, shape.inner)


class TrainableHead(nn.Module):
    """Parameters have the names of published checkpoints.

    Parameters
    ----------
    shape
        Sizes.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.num_states * shape.hidden, shape.hidden, bias=False)
        self.midlayer = _Layer(shape)
        self.norm = _Norm(shape.hidden, shape.eps)

    def begin(self, states: torch.Tensor) -> Unrolling:
        """Begin with the target's states [B, S, A * h]; depth 1 comes next."""
        return Unrolling(self, self.fc(states))


class Unrolling:
    """Depth after depth over the same tokens."""

    def __init__(self, head: TrainableHead, hidden: torch.Tensor) -> None:
        shape = head.shape
        self._head, self._hidden = head, hidden
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        length = hidden.shape[1]
        half = shape.head_size // 2
        angles = torch.arange(length)[:, None] * shape.rope_theta ** (-torch.arange(half) / half)[None]
        self._cosines, self._sines = angles.cos(), angles.sin()
        slots = torch.arange(length)
        self._behind = slots[:, None] - slots[None, :]  # how far each key is behind each query

    def next(self, embedded: torch.Tensor) -> torch.Tensor:
        """Run a depth over embeddings [B, S, h] of tokens after slots; returns [B, S, h], for logits."""
        layer, hidden = self._head.midlayer, self._hidden
        both = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], dim=-1)
        stream = hidden + self._attend(both)
        stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
        self._hidden = functional.pad(stream, (0, 0, 1, 0))[:, :-1]
        normed: torch.Tensor = self._head.norm(stream)
        return normed

    def _attend(self, both: torch.Tensor) -> torch.Tensor:
        shape, attention = self._head.shape, self._head.midlayer.self_attn
        groups = shape.heads // shape.kv_heads
        query = self._rotated(self._split(attention.q_proj(both)))
        self._keys.append(self._rotated(self._split(attention.k_proj(both))).repeat_interleave(groups, 1))
        self._values.append(self._split(attention.v_proj(both)).repeat_interleave(groups, 1))
        depth = len(self._keys)
        behind = query @ self._keys[0].transpose(2, 3)
        scores = [behind.masked_fill(self._behind < depth - 1, float("-inf"))]
        for made in range(1, depth):
            back = depth - 1 - made
            scores.append((query * _back(self._keys[made], back)).sum(-1, keepdim=True))
        whole = torch.cat(scores, dim=-1).float() * shape.head_size**-0.5
        whole = whole.masked_fill(_nothing_there(whole, self._behind.shape[0], depth), float("-inf"))
        shares = whole.softmax(-1).to(query.dtype)
        length = self._behind.shape[0]
        out = shares[..., :length] @ self._values[0]
        for made in range(1, depth):
            back = depth - 1 - made
            out = out + shares[..., length + made - 1 : length + made] * _back(self._values[made], back)
        batch = out.shape[0]
        result: torch.Tensor = attention.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return result

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:2], -1, self._head.shape.head_size).transpose(1, 2)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, -1)
        cosines, sines = self._cosines, self._sines
        turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)
        return turned.to(x.dtype)


def _back(x: torch.Tensor, count: int) -> torch.Tensor:
    """Let each slot have what is `count` slots before it; zeros where there is none."""
    return functional.pad(x, (0, 0, count, 0))[:, :, : x.shape[2]] if count else x


def _nothing_there(scores: torch.Tensor, length: int, depth: int) -> torch.Tensor:
    """Say which of the scores beyond the first `length` are of slots before the beginning: bool [S, ...]."""
    missing = torch.zeros(length, scores.shape[-1], dtype=torch.bool)
    for made in range(1, depth):
        missing[: depth - 1 - made, length + made - 1] = True
    return missing
