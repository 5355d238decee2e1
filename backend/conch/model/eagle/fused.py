"""An EAGLE head that runs in one native call: a decoder of one layer with an entry of its own."""

from __future__ import annotations

import ctypes

import torch

from conch.api import ModelSpec, StepBatch
from conch.model.attention import PagedStep
from conch.model.eagle.layout import HeadLayout
from conch.model.eagle.parts import HeadWeights
from conch.model.eagle.slots import DraftVocabulary, Given, Slots
from conch.model.fused.arena import Arena
from conch.model.fused.steps import NativeSteps
from conch_kernels.cpu.library import Team
from conch_kernels.cpu.native import DecoderSpec, Entry, Layer, Matrix, NativeDecoder, Norm
from conch_kernels.cpu.packing import FORMATS, interleave, pack, packed_bytes
from conch_kernels.cpu_attention import LANES, AttentionConstants, NativeAttention


def can_fuse(layout: HeadLayout, weights: HeadWeights) -> bool:
    """Tell whether native code can compute a head: it takes so many lanes at a time."""
    sizes = (weights.fusing.shape[0], weights.down.shape[1], weights.out.shape[1], weights.qkv.shape[0])
    return not any(size % LANES for size in (*sizes, layout.head_size))


class FusedHead:
    """`conch.model.eagle.head.EagleHead` in native code, built as `build_head` there says."""

    def __init__(
        self, layout: HeadLayout, weights: HeadWeights, kernel: NativeAttention, spec: ModelSpec
    ) -> None:
        self._native = _Packer(layout, weights, kernel.team).pack(kernel, spec)
        self._vocabulary = DraftVocabulary(weights.drafted, weights.embedding.shape[0])
        self._steps = NativeSteps()

    def run(self, batch: StepBatch, given: Given, step: PagedStep) -> Slots:
        """Compute the KV of all slots, and the rest of those that `batch.logit_rows` names."""
        team, native_step = self._steps.begin(batch, step)
        given_values = given.values.contiguous()
        outputs = torch.empty(batch.logit_rows.shape[0], self._native.hidden)
        native_step.given, native_step.from_target = given_values.data_ptr(), given.from_target
        native_step.outputs = outputs.data_ptr()
        logits, _ = self._native.run(team, native_step)
        return Slots(outputs, self._vocabulary.spread(logits))


class _Packer:
    """Packs one head."""

    def __init__(self, layout: HeadLayout, weights: HeadWeights, team: Team) -> None:
        self._layout, self._weights, self._team = layout, weights, team
        matrices = (weights.fusing, weights.qkv, weights.out, weights.up, weights.down, weights.logits)
        sizes = [packed_bytes(len(matrix), matrix.shape[1], matrix.dtype) for matrix in matrices]
        self._arena = Arena(sum(map(Arena.rounded, sizes)))

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
            rope=self._arena.keep(rope),
            window=spec.attention.windows[0] or 0,
        )
        decoder = DecoderSpec(
            layers=ctypes.pointer(layer),
            entry=ctypes.pointer(entry),
            embedding=self._arena.keep(weights.embedding),
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
        return NativeDecoder(decoder, [layer, entry, self._arena])

    def _matrix(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
        columns, depth = weight.shape
        room = self._arena.take(packed_bytes(columns, depth, weight.dtype))
        pack(weight, room, self._team)
        return Matrix(
            panels=room.data_ptr(),
            bias=None if bias is None else self._arena.keep(bias.float()),
            depth=depth,
            columns=columns,
            format=FORMATS[weight.dtype],
        )

    def _norm(self, weight: torch.Tensor | None) -> Norm:
        return Norm() if weight is None else Norm(weight=self._arena.keep(weight), eps=self._layout.eps)
