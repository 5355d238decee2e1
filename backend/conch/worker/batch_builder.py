"""From the rows of a plan to the tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from conch.api import Row, StepBatch
from conch.worker.row_table import RowTable

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class LogitRows:
    """Which token each of the L logit rows decides.

    Attributes
    ----------
    rows : int64 [L]
        Row in the row table.
    positions : int64 [L]
        Position of the token to be sampled: all tokens of the row before it are given, drafts included.
    """

    rows: I64
    positions: I64


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """How the tokens of a step are cut into rows: the fields of `StepBatch` that say so."""

    cu_query: torch.Tensor
    seq_lens: torch.Tensor
    logit_rows: torch.Tensor
    max_query: int
    max_seq_len: int


class BatchBuilder:
    """Packs rows, on the host, a few microseconds each.

    Parameters
    ----------
    table
        What is known of the requests.
    block_size
        S.
    device
        Where the tensors go.
    ahead
        `input_ids` are those of tokens so many places after their positions.
    """

    def __init__(self, table: RowTable, block_size: int, device: torch.device, ahead: int = 0) -> None:
        self._table = table
        self._ahead = ahead
        self._block_size = block_size
        self._device = device
        self._is_here = device.type == "cpu"

    def build(self, rows: Sequence[Row]) -> tuple[StepBatch, LogitRows]:
        """Build the step of at least one row. Block tables and drafts must be in the row table."""
        where = np.array([self._table.row_of(row.request_id) for row in rows], np.int64)
        starts = np.array([row.start for row in rows], np.int64)
        if all(row.count == 1 and row.samples for row in rows):
            return self._build_decodes(where, starts)
        counts = np.array([row.count for row in rows], np.int64)
        wanted = np.array([1 + len(row.drafts) if row.samples else 0 for row in rows], np.int64)
        ends = starts + counts
        cu_query = _cumulative(counts)
        token_rows, positions = _tokens(where, starts, counts, cu_query)
        logit_rows, decided = _logit_rows(where, ends, wanted, cu_query)
        cut = _Cut(
            cu_query=self._tensor(cu_query.astype(np.int32)),
            seq_lens=self._tensor(ends.astype(np.int32)),
            logit_rows=self._tensor(logit_rows),
            max_query=int(counts.max()),
            max_seq_len=int(ends.max()),
        )
        return self._gather(where, token_rows, positions, cut), decided

    def _build_decodes(self, where: I64, starts: I64) -> tuple[StepBatch, LogitRows]:
        """Build the step that is nearly every step: a token each, and each decides the next."""
        count, ends = len(where), starts + 1
        numbers = np.arange(count + 1)
        cut = _Cut(
            cu_query=self._tensor(numbers.astype(np.int32)),
            seq_lens=self._tensor(ends.astype(np.int32)),
            logit_rows=self._tensor(numbers[:count]),
            max_query=1,
            max_seq_len=int(ends.max()),
        )
        return self._gather(where, where, starts, cut), LogitRows(where, ends)

    def _gather(self, where: I64, token_rows: I64, positions: I64, cut: _Cut) -> StepBatch:
        table, size = self._table, self._block_size
        blocks = table.block_tables[token_rows, positions // size].astype(np.int64)
        return StepBatch(
            input_ids=self._tensor(table.token_ids[token_rows, positions + self._ahead].astype(np.int64)),
            positions=self._tensor(positions),
            cu_query=cut.cu_query,
            seq_lens=cut.seq_lens,
            block_tables=self._tensor(table.block_tables[where, : -(-cut.max_seq_len // size)]),
            slot_mapping=self._tensor(blocks * size + positions % size),
            logit_rows=cut.logit_rows,
            max_query=cut.max_query,
            max_seq_len=cut.max_seq_len,
        )

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._is_here else tensor.to(self._device, non_blocking=True)


def _tokens(where: I64, starts: I64, counts: I64, cu_query: I64) -> tuple[I64, I64]:
    """Return row and position of each token, R rows spread over T tokens."""
    positions = np.arange(cu_query[-1]) - np.repeat(cu_query[:-1] - starts, counts)
    return np.repeat(where, counts), positions


def _logit_rows(where: I64, ends: I64, wanted: I64, cu_query: I64) -> tuple[I64, LogitRows]:
    """Return the last `wanted` tokens of each row, and what they decide."""
    cu_wanted = _cumulative(wanted)
    back = np.repeat(cu_wanted[1:], wanted) - np.arange(cu_wanted[-1])  # row by row, counted from its end
    rows, positions = np.repeat(where, wanted), np.repeat(ends, wanted) - back + 1
    return np.repeat(cu_query[1:], wanted) - back, LogitRows(rows, positions)


def _cumulative(counts: I64) -> I64:
    """Return ``[0, c0, c0 + c1, ...]``."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums
