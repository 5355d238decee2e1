"""An EAGLE head in torch's own operations: one decoder layer over the target's states."""

from __future__ import annotations

import torch
from torch.nn import functional

from conch.api import AttentionKernel, ModelSpec, StepBatch
from conch.model.attention import PagedStep
from conch.model.eagle.layout import HeadLayout
from conch.model.eagle.parts import HeadWeights
from conch.model.eagle.slots import DraftVocabulary, Given, Slots


class PlainHead:
    """`conch.model.eagle.head.EagleHead` for any kernel and device, built as `build_head` there says."""

    def __init__(
        self, layout: HeadLayout, weights: HeadWeights, kernel: AttentionKernel, spec: ModelSpec
    ) -> None:
        self._layout, self._weights, self._dtype = layout, weights, weights.fusing.dtype
        self._vocabulary = DraftVocabulary(weights.drafted, weights.embedding.shape[0])
        cosines, sines = layout.rope_angles(spec.max_model_len)
        device = weights.fusing.device
        self._cosines = torch.cat([cosines, cosines], dim=1)[:, None].to(device)
        self._sines = torch.cat([-sines, sines], dim=1)[:, None].to(device)
        self._constants = {
            "scaling": layout.head_size**-0.5,
            "sliding_window": spec.attention.windows[0],
        }

    def run(self, batch: StepBatch, given: Given, step: PagedStep) -> Slots:
        """Compute the KV of all slots, and the rest of those that `batch.logit_rows` names."""
        weights = self._weights
        read = self._read(given.values) if given.from_target else given.values
        embedded = functional.embedding(batch.input_ids, weights.embedding)
        if weights.embedding_norm is None or weights.state_norm is None:
            stream = self._fused(torch.cat([embedded, read.to(self._dtype)], dim=-1)).float()
            into = stream.to(self._dtype)
        else:
            normed = self._normed(read, weights.state_norm)
            stream = normed.float() if self._layout.normed_residual else read
            into = torch.cat([self._normed(embedded.float(), weights.embedding_norm), normed], dim=-1)
        attended = self._attend(into, batch, step)
        wanted = batch.logit_rows
        outputs = self._outputs(stream[wanted], attended[wanted])
        return Slots(outputs, self._vocabulary.spread(self._logits(outputs)))

    def _read(self, states: torch.Tensor) -> torch.Tensor:
        """Turn the target's states [T, A, h] into what slots are made of: float32 [T, h]."""
        if self._weights.target_norm is not None:
            return self._normed(states[:, 0].float(), self._weights.target_norm).float()
        return self._fused(states.flatten(1).to(self._dtype)).float()

    def _fused(self, joined: torch.Tensor) -> torch.Tensor:
        return functional.linear(joined, self._weights.fusing, self._weights.fusing_bias)

    def _outputs(self, stream: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        weights = self._weights
        stream = stream + functional.linear(attended, weights.out)
        gate, up = (
            functional.linear(self._normed(stream, weights.mlp_norm), weights.up).float().chunk(2, dim=-1)
        )
        return stream + functional.linear((functional.silu(gate) * up).to(self._dtype), weights.down)

    def _logits(self, outputs: torch.Tensor) -> torch.Tensor:
        last = self._weights.last_norm
        normed = outputs.to(self._dtype) if last is None else self._normed(outputs, last)
        return functional.linear(normed, self._weights.logits).float()

    def _attend(self, into: torch.Tensor, batch: StepBatch, step: PagedStep) -> torch.Tensor:
        layout = self._layout
        heads = functional.linear(into, self._weights.qkv, self._weights.qkv_bias).float()
        heads = heads.reshape(len(into), -1, layout.head_size)
        turned = heads[:, : layout.heads + layout.kv_heads]
        swapped = torch.roll(turned, layout.head_size // 2, dims=-1)
        turned = turned * self._cosines[batch.positions] + swapped * self._sines[batch.positions]
        turned = turned.to(self._dtype)
        query, key = turned[:, : layout.heads], turned[:, layout.heads :]
        value = heads[:, layout.heads + layout.kv_heads :].to(self._dtype)
        return step.attend_layer(0, (query, key, value), self._constants).flatten(1)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(x, weight.shape, weight, self._layout.eps).to(self._dtype)
