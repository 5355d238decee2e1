"""An EAGLE head that runs in one native call: a decoder of one layer with an entry of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from conch.api import ModelSpec, StepBatch
from conch.model.attention import PagedStep
from conch.model.eagle.layout import HeadLayout
from conch.model.eagle.parts import HeadWeights
from conch.model.eagle.slots import DraftVocabulary, Given, Slots
from conch.model.fused.arena import Arena
from conch_kernels.cpu.library import Team, prefer_large_pages
from conch_kernels.cpu.native import DecoderSpec, Entry, Layer, Matrix, NativeDecoder, Norm, Step
from conch_kernels.cpu.packing import FORMATS, interleave, pack, packed_bytes
from conch_kernels.cpu_attention import LANES, AttentionConstants, NativeAttention, NativePlan


def can_fuse(layout: HeadLayout, weights: HeadWeights) -> bool:
    """Tell whether native code can compute a head: it takes so many lanes at a time."""
    sizes = (weights.fusing.shape[0], weights.down.shape[1], weights.out.shape[1], weights.qkv.shape[0])
    return not any(size % LANES for size in (*sizes, layout.head_size))


class FusedHead:
    """`conch.model.eagle.head.EagleHead` in native code.

    Parameters
    ----------
    layout, weights
        The head.
    kernel
        Its attention.
    spec
        The head as a model of one layer.
    """

    def __init__(
        self, layout: HeadLayout, weights: HeadWeights, kernel: NativeAttention, spec: ModelSpec
    ) -> None:
        self._native = _Packer(layout, weights, kernel.team).pack(kernel, spec)
        self._vocabulary = DraftVocabulary(weights.drafted, weights.embedding.shape[0])
        self._pools: Sequence[torch.Tensor] = ()

    def run(self, batch: StepBatch, given: Given, step: PagedStep) -> Slots:
        """Compute the KV of all slots, and the rest of those that `batch.logit_rows` names."""
        plan, (pool,) = step.plan, step.pools
        assert isinstance(plan, NativePlan), "a fused head is only built for a native attention kernel"
        if step.pools is not self._pools:
            prefer_large_pages(pool, in_use=True)
            self._pools = step.pools
        values, pools = given.values.contiguous(), ctypes.c_void_p(pool.data_ptr())
        outputs = torch.empty(batch.logit_rows.shape[0], self._native.hidden)
        native_step = Step(
            rows=plan.rows,
            input_ids=batch.input_ids.data_ptr(),
            logit_rows=batch.logit_rows.data_ptr(),
            pools=ctypes.addressof(pools),
            pool_half=pool.stride(0) * pool.element_size(),
            given=values.data_ptr(),
            outputs=outputs.data_ptr(),
            num_logit_rows=len(outputs),
            from_target=given.from_target,
        )
        logits, _ = self._native.run(plan.team, native_step)
        return Slots(outputs, self._vocabulary.spread(logits))


class _Packer:
    """Packs one head."""

    def __init__(self, layout: HeadLayout, weights: HeadWeights, team: Team) -> None:
        self._layout, self._weights, self._team = layout, weights, team
        matrices = (weights.fusing, weights.qkv, weights.out, weights.up, weights.down, weights.logits)
        sizes = [packed_bytes(len(matrix), matrix.shape[1], matrix.dtype) for matrix in matrices]
        self._arena = Arena(sum(map(Arena.rounded, sizes)))
        self._kept: list[object] = [self._arena]

    def pack(self, kernel: NativeAttention, spec: ModelSpec) -> NativeDecoder:
        layout, weights = self._layout, self._weights
        entry = Entry(
            fusing=self._matrix(weights.fusing, weights.fusing_bias),
            target=self._norm(weights.target_norm),
            embedding=self._norm(weights.embedding_norm),
            state=self._norm(weights.state_norm),
            normed_residual=layout.normed_residual,
        )
        rope = torch.cat(layout.rope_angles(spec.max_model_len), dim=1)
        layer = Layer(
            mlp_in=self._norm(weights.mlp_norm),
            qkv=self._matrix(weights.qkv, weights.qkv_bias),
            out=self._matrix(weights.out),
            up=self._matrix(interleave(weights.up)),
            down=self._matrix(weights.down),
            attention=AttentionConstants(scale=layout.head_size**-0.5, softcap=0.0, sinks=None),
            rope=self._keep(rope),
            window=spec.attention.windows[0] or 0,
        )
        decoder = DecoderSpec(
            layers=ctypes.pointer(layer),
            entry=ctypes.pointer(entry),
            embedding=self._keep(weights.embedding),
            head=self._matrix(weights.logits),
            final=self._norm(weights.last_norm),
            num_layers=1,
            hidden=weights.fusing.shape[0],
            heads=layout.heads,
            kv_heads=layout.kv_heads,
            head_size=layout.head_size,
            inner=weights.down.shape[1],
            rotary=rope.shape[1],
            element=FORMATS[weights.fusing.dtype],
            embedding_scale=1.0,
            residual_scale=1.0,
            logit_scale=1.0,
            kv=kernel.layout,
        )
        return NativeDecoder(decoder, [*self._kept, layer, entry])

    def _matrix(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
        columns, depth = weight.shape
        room = self._arena.take(packed_bytes(columns, depth, weight.dtype))
        pack(weight, room, self._team)
        return Matrix(
            panels=room.data_ptr(),
            bias=None if bias is None else self._keep(bias.float()),
            depth=depth,
            columns=columns,
            format=FORMATS[weight.dtype],
        )

    def _norm(self, weight: torch.Tensor | None) -> Norm:
        return Norm() if weight is None else Norm(weight=self._keep(weight), eps=self._layout.eps)

    def _keep(self, tensor: torch.Tensor) -> int:
        """Hold on to a tensor; returns its address."""
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()
