"""A decoder as data: shapes, constants, and which parameters of a checkpoint play which part."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class NormPart:
    """An RMSNorm.

    Attributes
    ----------
    weight
        Name of a parameter.
    eps
        Added to the mean square.
    offset
        Added to the weight; Gemma's checkpoints store weight - 1.
    """

    weight: str
    eps: float
    offset: float


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """A linear layer: parameters whose rows are put one below the other.

    Attributes
    ----------
    weights, biases
        Names of parameters; no biases for none.
    interleaved
        Whether the rows of two equal halves alternate in runs of 16: gate and up.
    """

    weights: tuple[str, ...]
    biases: tuple[str, ...] = ()
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One decoder layer; an absent norm is None.

    Attributes
    ----------
    rope
        Which of the blueprint's tables rotates queries and keys; None for none.
    scale, window, softcap
        Of its attention, as in `conch.api.AttentionLayer`.
    """

    attention_in: NormPart | None
    query: NormPart | None
    key: NormPart | None
    attention_out: NormPart | None
    mlp_in: NormPart | None
    mlp_out: NormPart | None
    qkv: MatrixPart
    out: MatrixPart
    up: MatrixPart
    down: MatrixPart
    rope: str | None
    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Blueprint:
    """A whole decoder.

    Attributes
    ----------
    embedding
        Name of the embedding; the same as `head`'s weight where they are tied.
    rope_tables : each float32 [max_model_len, rotary]
        By name: cosines, then sines.
    norm_whole_rows
        Whether queries and keys are normalised over all heads at once rather than head by head.
    shapes
        Of every parameter that is used, by name.
    """

    layers: tuple[LayerPart, ...]
    embedding: str
    head: MatrixPart
    final: NormPart
    rope_tables: dict[str, torch.Tensor]
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    activation: str
    norm_whole_rows: bool
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    logit_softcap: float | None
    shapes: dict[str, tuple[int, ...]]

    @property
    def rotary(self) -> int:
        """Leading lanes of a head that are rotated."""
        return next((table.shape[1] for table in self.rope_tables.values()), 0)
