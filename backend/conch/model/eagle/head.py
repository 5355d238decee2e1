"""An EAGLE head that runs: one decoder layer over the target's states, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from conch.api import AttentionKernel, StepBatch
from conch.model.attention import PagedStep
from conch.model.eagle.layout import HeadLayout
from conch.model.eagle.parts import HeadWeights
from conch_kernels.cpu.product import PackedMatrix
from conch_kernels.cpu_attention import NativeAttention

Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """Slots whose KV is computed: the stream before attention and what attention has brought, [T, h] each.

    Most of the head's work is still to be done, and is needed only where a draft begins.
    """

    stream: torch.Tensor
    attended: torch.Tensor


class EagleHead:
    """Computes slots of packed rows. Slot i is made of the target's state at token i and of token i + 1.

    Parameters
    ----------
    layout, weights
        The head.
    kernel
        Its attention; where that is native, so are products.
    max_model_len
        Slots that a request may have.
    """

    def __init__(
        self, layout: HeadLayout, weights: HeadWeights, kernel: AttentionKernel, max_model_len: int
    ) -> None:
        def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
            return _make_linear(weight, bias, kernel)

        self._layout, self._dtype = layout, weights.fusing.dtype
        self._embedding, self._drafted = weights.embedding, weights.drafted
        self._embedding_norm, self._state_norm = weights.embedding_norm, weights.state_norm
        self._mlp_norm, self._last_norm = weights.mlp_norm, weights.last_norm
        self._target_norm = weights.target_norm
        self._fusing = linear(weights.fusing, weights.fusing_bias)
        self._qkv = linear(weights.qkv, weights.qkv_bias)
        self._out, self._up, self._down = linear(weights.out), linear(weights.up), linear(weights.down)
        self._head = linear(weights.logits)
        half = layout.head_size // 2
        device = weights.fusing.device
        rates = layout.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(max_model_len, dtype=torch.float64)[:, None] * rates
        angles = torch.cat([angles, angles], dim=1)[:, None]
        self._cosines, self._sines = angles.cos().float().to(device), angles.sin().float().to(device)
        self._sines[..., :half] *= -1
        self._scale = layout.head_size**-0.5
        self._whole = weights.fusing.new_empty(0, weights.embedding.shape[0], dtype=torch.float32)

    def read(self, states: torch.Tensor) -> torch.Tensor:
        """Turn the target's states [T, A, h] into what slots are made of: float32 [T, h]."""
        if self._target_norm is not None:
            return self._normed(states[:, 0].float(), self._target_norm).float()
        return self._fusing(states.flatten(1).to(self._dtype)).float()

    def run(self, batch: StepBatch, read: torch.Tensor, step: PagedStep, window: int | None) -> Slots:
        """Compute the KV of slots; what else there is to them is computed where it is asked for."""
        embedded = functional.embedding(batch.input_ids, self._embedding)
        if self._embedding_norm is None or self._state_norm is None:
            stream = self._fusing(torch.cat([embedded, read.to(self._dtype)], dim=-1)).float()
            into = stream.to(self._dtype)
        else:
            normed = self._normed(read, self._state_norm)
            stream = normed.float() if self._layout.normed_residual else read
            into = torch.cat([self._normed(embedded.float(), self._embedding_norm), normed], dim=-1)
        return Slots(stream, self._attend(into, batch, step, window))

    def outputs(self, slots: Slots, places: Sequence[int]) -> torch.Tensor:
        """Return what may stand for the state after each of some slots: float32 [L, h]."""
        stream, attended = slots.stream, slots.attended
        if len(places) < len(stream):
            stream, attended = stream[places], attended[places]
        stream = stream + self._out(attended)
        gate, up = self._up(self._normed(stream, self._mlp_norm)).chunk(2, dim=-1)
        return stream + self._down((functional.silu(gate) * up).to(self._dtype))

    def logits(self, slots: torch.Tensor) -> torch.Tensor:
        """Return logits over the target's vocabulary, -inf where the head cannot draft: float32 [L, V].

        Valid until the next call.
        """
        last = self._last_norm
        values = self._head(slots.to(self._dtype) if last is None else self._normed(slots, last)).float()
        if self._drafted is None:
            return values
        if len(values) > len(self._whole):  # what the head cannot draft is written once
            self._whole = self._whole.new_full((len(values), self._whole.shape[1]), float("-inf"))
        return self._whole[: len(values)].index_copy_(1, self._drafted, values)

    def _attend(
        self, into: torch.Tensor, batch: StepBatch, step: PagedStep, window: int | None
    ) -> torch.Tensor:
        layout = self._layout
        heads = self._qkv(into).float().reshape(len(into), -1, layout.head_size)
        turned = heads[:, : layout.heads + layout.kv_heads]
        swapped = torch.roll(turned, layout.head_size // 2, dims=-1)
        turned = turned * self._cosines[batch.positions] + swapped * self._sines[batch.positions]
        turned = turned.to(self._dtype)
        query, key = turned[:, : layout.heads], turned[:, layout.heads :]
        value = heads[:, layout.heads + layout.kv_heads :].to(self._dtype)
        constants = {"scaling": self._scale, "sliding_window": window}
        return step.attend_layer(0, (query, key, value), constants).flatten(1)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(x, weight.shape, weight, self._layout.eps).to(self._dtype)


def _make_linear(weight: torch.Tensor, bias: torch.Tensor | None, kernel: AttentionKernel) -> Linear:
    if not isinstance(kernel, NativeAttention):
        return lambda x: functional.linear(x, weight, bias)
    packed = PackedMatrix(weight, kernel.team)
    if bias is None:
        return packed
    added = bias.float()
    return lambda x: packed(x) + added
