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
    """

    def __init__(self, table: RowTable, block_size: int, device: torch.device) -> None:
        self._table = table
        self._block_size = block_size
        self._device = device

    def build(self, rows: Sequence[Row]) -> tuple[StepBatch, LogitRows]:
        """Build the step of at least one row. Block tables and drafts must be in the row table."""
        table, size = self._table, self._block_size
        where = np.fromiter((table.row_of(row.request_id) for row in rows), np.int64, len(rows))
        starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
        counts = np.fromiter((row.count for row in rows), np.int64, len(rows))
        wanted = np.fromiter((1 + len(row.drafts) if row.samples else 0 for row in rows), np.int64, len(rows))
        ends = starts + counts
        cu_query = _cumulative(counts)
        token_rows = np.repeat(where, counts)
        positions = np.arange(cu_query[-1]) - np.repeat(cu_query[:-1] - starts, counts)
        blocks = table.block_tables[token_rows, positions // size].astype(np.int64)
        longest = int(ends.max())
        # The last `wanted` tokens of each row: row by row, counted back from its end.
        cu_wanted = _cumulative(wanted)
        back = np.repeat(cu_wanted[1:], wanted) - np.arange(cu_wanted[-1])
        batch = StepBatch(
            input_ids=self._tensor(table.token_ids[token_rows, positions].astype(np.int64)),
            positions=self._tensor(positions),
            cu_query=self._tensor(cu_query.astype(np.int32)),
            seq_lens=self._tensor(ends.astype(np.int32)),
            block_tables=self._tensor(table.block_tables[where, : -(-longest // size)]),
            slot_mapping=self._tensor(blocks * size + positions % size),
            logit_rows=self._tensor(np.repeat(cu_query[1:], wanted) - back),
            max_query=int(counts.max()),
            max_seq_len=longest,
        )
        return batch, LogitRows(np.repeat(where, wanted), np.repeat(ends, wanted) - back + 1)

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _cumulative(counts: I64) -> I64:
    """Return ``[0, c0, c0 + c1, ...]``."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
