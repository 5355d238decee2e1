"""What every paged attention kernel is given. Letters as in `conch_kernels.reference`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of a step: R sequences, each with its last few tokens to compute.

    Attributes
    ----------
    cu_query : R+1 numbers
        Row r owns tokens ``cu_query[r]:cu_query[r+1]``, the last ones of its sequence.
    seq_lens : R numbers
        Tokens of each sequence, those of this step included.
    block_tables : int32 [R, B]
        Blocks of each sequence in order; entries past its last block are never used.
    slot_mapping : int64 [T]
        Where each token's KV goes: ``block * block_size + offset``.
    """

    cu_query: list[int]
    seq_lens: list[int]
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """How scores are made of queries and keys.

    Attributes
    ----------
    scale
        Multiplies the products.
    window
        Tokens that a query sees, itself included; None for all before it.
    softcap
        Scores become ``softcap * tanh(score / softcap)``; None for none.
    sinks : [H] or None
        One extra score per head in the softmax that takes no value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
