"""The rows of a step, divided among the parts of a stage: data-parallel attention.

A part computes attention, and all else but experts, for rows of its own. A block of KV is written by one
part, and which parts hold it is known to all: it follows from the plans. A row that goes to a part that lacks
some of its blocks (they were computed for another request, or elsewhere before) brings them along from a part
that has them. Every pool has all blocks, so any part can hold any row; what is divided is the work, not the
pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from conch.api import Arena, Move, StepBatch
from conch.model.attention import PagedStep
from conch.model.mesh.experts.layer import ExpertLayer
from conch.model.mesh.group import MeshGroup

I64 = npt.NDArray[np.int64]
Compute = Callable[[StepBatch, PagedStep], "torch.Tensor | None"]


class Rows(Protocol):
    """Who computes which rows."""

    def follow(self, moves: Sequence[Move]) -> None:
        """Hear which blocks were moved before the next step."""

    def run(self, batch: StepBatch, step: PagedStep, compute: Compute) -> torch.Tensor | None:
        """Compute this rank's rows; returns the logits of all rows where they are gathered, else None."""


class AllRows:
    """Every rank of a stage computes all rows."""

    def follow(self, moves: Sequence[Move]) -> None:
        """Do nothing: whatever is moved is here."""

    def run(self, batch: StepBatch, step: PagedStep, compute: Compute) -> torch.Tensor | None:
        """Compute all."""
        return compute(batch, step)


@dataclass(frozen=True, slots=True)
class Lots:
    """A step divided.

    Attributes
    ----------
    part_of_row : [R]
        Who computes each row.
    fetches
        Blocks that a part needs and another one has: block, from, to.
    """

    part_of_row: I64
    fetches: tuple[tuple[int, int, int], ...]


class Holders:
    """Which parts hold each block, as bits of a number; the same at every rank of a stage.

    Parameters
    ----------
    num_parts
        Parts of the stage.
    block_size
        S.
    """

    def __init__(self, num_parts: int, block_size: int) -> None:
        self._num_parts, self._block_size = num_parts, block_size
        self._bits = {arena: np.zeros(0, np.int64) for arena in Arena}

    def bits(self, block: int) -> int:
        """Return the parts that hold a block of the KV pool."""
        return int(self._reach(Arena.DEVICE, block)[block])

    def follow(self, moves: Sequence[Move]) -> None:
        """Copy what is known of a block along with it."""
        for move in moves:
            source = self._reach(move.source_arena, move.source)[move.source]
            self._reach(move.target_arena, move.target)[move.target] = source

    def divide(self, starts: I64, ends: I64, tables: I64) -> Lots:
        """Give each row to a part, and take note of what it will hold.

        A row goes where there are fewest rows; each block that it lacks there weighs as much as one row.

        Parameters
        ----------
        starts, ends : [R]
            Tokens of each row that have KV, before the step and after it.
        tables : [R, B]
            Blocks of each.
        """
        bits = self._reach(Arena.DEVICE, int(tables.max()))
        numbers = np.arange(tables.shape[1])
        needed = (numbers < -(-starts // self._block_size)[:, None]) & (tables >= 0)
        held = np.where(needed, bits[tables], -1)
        lacking = [(~held >> part & 1).sum(axis=1).tolist() for part in range(self._num_parts)]
        parts = _choose(lacking, (ends - starts).tolist())
        fetches: dict[tuple[int, int], int] = {}
        for row, part in enumerate(parts):
            bit = 1 << part
            if lacking[part][row]:
                wanted = needed[row] & (held[row] & bit == 0)
                pairs = zip(tables[row][wanted].tolist(), held[row][wanted].tolist(), strict=True)
                fetches.update({(block, part): _lowest(holders) for block, holders in pairs})
            bits[tables[row][needed[row]]] |= bit
            first, last = int(starts[row]) // self._block_size, -(-int(ends[row]) // self._block_size)
            bits[tables[row, first:last]] = bit
        listed = tuple((block, source, part) for (block, part), source in fetches.items())
        return Lots(np.array(parts, np.int64), listed)

    def _reach(self, arena: Arena, number: int) -> I64:
        bits = self._bits[arena]
        if number >= len(bits):
            bits = self._bits[arena] = np.concatenate([bits, np.zeros(number + 1, np.int64)])
        return bits


def _choose(lacking: Sequence[Sequence[int]], counts: Sequence[int]) -> list[int]:
    """Return the part of each row, in their order.

    Parameters
    ----------
    lacking : [E, R]
        Blocks that a row would have to bring to a part.
    counts : [R]
        Its tokens, which decide between parts that are as good otherwise.
    """
    rows, tokens = [0] * len(lacking), [0] * len(lacking)
    chosen = []
    for row, count in enumerate(counts):
        costs = [
            (own + lacks[row], given, part)
            for part, (own, given, lacks) in enumerate(zip(rows, tokens, lacking, strict=True))
        ]
        part = min(costs)[2]
        rows[part] += 1
        tokens[part] += count
        chosen.append(part)
    return chosen


def _lowest(bits: int) -> int:
    assert bits, "a block that is needed is held by somebody"
    return (bits & -bits).bit_length() - 1


class DividedRows:
    """Each part of a stage computes its own rows, and the experts' share of all.

    Parameters
    ----------
    group
        The ranks.
    layers
        Of this rank, those with experts.
    block_size
        S.
    vocabulary
        Columns of logits.
    dtype
        Of logits.
    """

    def __init__(
        self,
        group: MeshGroup,
        layers: Sequence[ExpertLayer],
        block_size: int,
        vocabulary: int,
        dtype: torch.dtype,
    ) -> None:
        self._group, self._layers = group, layers
        self._part, self._num_parts = group.seat.expert_part, group.seat.shape.expert
        self._holders = Holders(self._num_parts, block_size)
        self._no_logits = torch.empty(0, vocabulary, dtype=dtype)

    def follow(self, moves: Sequence[Move]) -> None:
        """Hear which blocks were moved before the next step."""
        self._holders.follow(moves)

    def run(self, batch: StepBatch, step: PagedStep, compute: Compute) -> torch.Tensor | None:
        """Compute this part's rows."""
        ends, counts = batch.seq_lens.numpy().astype(np.int64), batch.cu_query.diff().numpy()
        lots = self._holders.divide(ends - counts, ends, batch.block_tables.numpy().astype(np.int64))
        if lots.fetches:
            self._fetch(step.pools, lots.fetches)
        own = np.flatnonzero(lots.part_of_row == self._part)
        if len(own):
            part = take_rows(batch, own)
            values = compute(part, step.over(part))
        else:
            for layer in self._layers:
                layer.serve()
            values = None
        return self._join(batch, lots, values)

    def _fetch(self, pools: Sequence[torch.Tensor], fetches: Sequence[tuple[int, int, int]]) -> None:
        """Bring blocks of all layers to the parts that need them."""
        leaving: list[list[int]] = [[] for _ in range(self._num_parts)]
        coming: list[list[int]] = [[] for _ in range(self._num_parts)]
        for block, source, to in fetches:
            if source == self._part:
                leaving[to].append(block)
            if to == self._part:
                coming[source].append(block)
        going = [block for blocks in leaving for block in blocks]
        widths = [pool[:, :1].numel() for pool in pools]
        packed = [
            pool[:, going].transpose(0, 1).reshape(len(going), width)
            for pool, width in zip(pools, widths, strict=True)
        ]
        sent, received = list(map(len, leaving)), list(map(len, coming))
        came = self._group.move_blocks(torch.cat(packed, dim=1), sent, received)
        arrived = [block for blocks in coming for block in blocks]
        for pool, piece in zip(pools, torch.split(came, widths, dim=1), strict=True):
            pool[:, arrived] = piece.reshape(len(arrived), 2, *pool.shape[2:]).transpose(0, 1)

    def _join(self, batch: StepBatch, lots: Lots, values: torch.Tensor | None) -> torch.Tensor | None:
        """Bring the logits of all parts to the first one, in the order of the step."""
        seat = self._group.seat
        if not seat.is_last_stage or seat.part:
            return None
        rows = np.searchsorted(batch.cu_query.numpy(), batch.logit_rows.numpy(), side="right") - 1
        part_of_logits = lots.part_of_row[rows]
        own = self._no_logits if values is None else values
        counts = np.bincount(part_of_logits, minlength=self._num_parts).tolist()
        assert len(own) == counts[self._part]
        if sum(counts[1:]):
            own = self._group.collect(own, counts)
        if self._part:
            return None
        order = torch.from_numpy(np.argsort(part_of_logits, kind="stable"))
        joined = torch.empty_like(own)
        joined[order] = own
        return joined


def take_rows(batch: StepBatch, rows: I64) -> StepBatch:
    """Return the step of some rows only."""
    cu_query, logit_rows = batch.cu_query.numpy().astype(np.int64), batch.logit_rows.numpy()
    counts = cu_query[rows + 1] - cu_query[rows]
    firsts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    tokens = np.repeat(cu_query[rows] - firsts[:-1], counts) + np.arange(firsts[-1])
    new_first = np.full(len(cu_query) - 1, -1, np.int64)
    new_first[rows] = firsts[:-1]
    owners = np.searchsorted(cu_query, logit_rows, side="right") - 1
    is_taken = new_first[owners] >= 0
    logits = (logit_rows - cu_query[owners] + new_first[owners])[is_taken]
    taken, which = torch.from_numpy(tokens), torch.from_numpy(rows)
    seq_lens = batch.seq_lens[which]
    return StepBatch(
        input_ids=batch.input_ids[taken],
        positions=batch.positions[taken],
        cu_query=torch.from_numpy(firsts.astype(np.int32)),
        seq_lens=seq_lens,
        block_tables=batch.block_tables[which],
        slot_mapping=batch.slot_mapping[taken],
        logit_rows=torch.from_numpy(logits),
        max_query=int(counts.max()),
        max_seq_len=int(seq_lens.max()),
    )
