"""Weights into panels, in the order in which a step reads them, and the description that points to them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from conch.api import ModelSpec
from conch.model.fused.arena import Arena
from conch.model.fused.blueprint import Blueprint, LayerPart, MatrixPart, NormPart
from conch.model.fused.matrices import Matrices, Source, shape_of, stacked
from conch_kernels.cpu.native import ACTIVATIONS, DecoderSpec, Layer, Matrix, NativeDecoder, Norm
from conch_kernels.cpu.packing import FORMATS
from conch_kernels.cpu_attention import AttentionConstants, KvLayout


class Assembler:
    """Packs one model.

    Parameters
    ----------
    blueprint
        What it is.
    spec
        What plugins know of it.
    source
        The parameters.
    matrices
        How matrices are kept.
    """

    def __init__(self, blueprint: Blueprint, spec: ModelSpec, source: Source, matrices: Matrices) -> None:
        self._blueprint, self._spec, self._source, self._matrices = blueprint, spec, source, matrices
        self._dtype: torch.dtype = getattr(torch, spec.attention.dtype)
        self._arena = Arena(self._total_bytes())

    def assemble(self, progress: Callable[[float], None]) -> NativeDecoder:
        """Pack all weights; `progress` is told the share that is done."""
        plan, attention = self._blueprint, self._spec.attention
        tables = {name: self._arena.keep(table) for name, table in plan.rope_tables.items()}
        layers = (Layer * len(plan.layers))()
        for index, part in enumerate(plan.layers):
            layers[index] = self._layer(part, tables)
            progress((index + 1) / (len(plan.layers) + 1))
        tied = plan.embedding == plan.head.weights[0]
        spec = DecoderSpec(
            layers=layers,
            embedding=None if tied else self._arena.keep(self._source.dense(plan.embedding).to(self._dtype)),
            head=self._matrix(plan.head),
            final=self._norm(plan.final),
            num_layers=len(plan.layers),
            hidden=plan.hidden,
            heads=plan.heads,
            kv_heads=plan.kv_heads,
            head_size=plan.head_size,
            inner=plan.inner,
            rotary=plan.rotary,
            element=FORMATS[self._dtype],
            activation=ACTIVATIONS.index(plan.activation),
            norm_whole_rows=plan.norm_whole_rows,
            embedding_scale=plan.embedding_scale,
            residual_scale=plan.residual_scale,
            logit_scale=plan.logit_scale,
            logit_softcap=plan.logit_softcap or 0.0,
            kv=KvLayout(
                plan.kv_heads,
                plan.head_size,
                plan.head_size,
                attention.block_size,
                attention.pool_dtype == "int8",
            ),
        )
        progress(1.0)
        return NativeDecoder(spec, [layers, self._arena])

    def _layer(self, part: LayerPart, tables: dict[str, int]) -> Layer:
        return Layer(
            attention_in=self._norm(part.attention_in),
            query=self._norm(part.query),
            key=self._norm(part.key),
            attention_out=self._norm(part.attention_out),
            mlp_in=self._norm(part.mlp_in),
            mlp_out=self._norm(part.mlp_out),
            qkv=self._matrix(part.qkv),
            out=self._matrix(part.out),
            up=self._matrix(part.up),
            down=self._matrix(part.down),
            attention=AttentionConstants(scale=part.scale, softcap=part.softcap or 0.0, sinks=None),
            rope=None if part.rope is None else tables[part.rope],
            window=part.window or 0,
        )

    def _matrix(self, part: MatrixPart) -> Matrix:
        columns, depth = shape_of(part, self._blueprint.shapes)
        room = self._arena.take(self._matrices.size(part))
        layout = self._matrices.write(part, room)
        bias = None
        if part.biases:
            bias = self._arena.keep(stacked(part, [self._source.dense(name).float() for name in part.biases]))
        return Matrix(panels=room.data_ptr(), bias=bias, depth=depth, columns=columns, format=layout)

    def _norm(self, part: NormPart | None) -> Norm:
        if part is None:
            return Norm()
        return Norm(
            weight=self._arena.keep(self._source.dense(part.weight).float() + part.offset),
            eps=part.eps,
        )

    def _total_bytes(self) -> int:
        plan = self._blueprint
        parts = [
            plan.head,
            *(m for layer in plan.layers for m in (layer.qkv, layer.out, layer.up, layer.down)),
        ]
        return sum(Arena.rounded(self._matrices.size(part)) for part in parts)
