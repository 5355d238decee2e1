"""The batch as the model sees it.

Letters, here and in every docstring of conch: T tokens in the step, R rows, L logit rows, B blocks of the
longest row, H query heads, K KV heads, D head size, V vocabulary, N blocks in the pool, S tokens in a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """One step's rows, packed: no padding between rows, built whole once a step.

    Attributes
    ----------
    input_ids : int64 [T]
    positions : int64 [T]
        Of each token in its own sequence.
    cu_query : int32 [R+1]
        Row r owns tokens ``cu_query[r]:cu_query[r+1]``.
    seq_lens : int32 [R]
        Tokens of KV that row r attends to, those of this step included.
    block_tables : int32 [R, B]
        Entries past a row's last block are 0 and never read; nor are those wholly behind the layer's window,
        which may be anything.
    slot_mapping : int64 [T]
        Where each token's KV goes: ``block * S + offset``.
    logit_rows : int64 [L]
        Tokens whose logits are needed.
    max_query, max_seq_len
        Largest count and largest `seq_lens`, known on the host.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    cu_query: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    logit_rows: torch.Tensor
    max_query: int
    max_seq_len: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """One layer's cache and the constants of its attention.

    Attributes
    ----------
    kv : [2, N, ...]
        This layer's KV pool in the kernel's own layout; dim 1 counts blocks.
    scale
        Multiplies the scores.
    window
        Tokens that a query sees, itself included; None for all before it.
    softcap
        Scores become ``softcap * tanh(score / softcap)``; None for none.
    sinks : [H] or None
        One extra logit per head in the softmax that takes no value.
    """

    index: int
    kv: torch.Tensor
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
