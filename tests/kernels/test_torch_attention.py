"""The torch attention kernel against the plain meaning, over odd shapes and dtypes."""

from __future__ import annotations

import pytest
import torch

from conch_kernels import reference
from conch_kernels.paged import Rows, Scores
from conch_kernels.torch_attention import attend, group_rows, write_kv

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Case:
    """Random packed rows over a pool whose blocks are handed out in random order."""

    def __init__(self, rows, heads, kv_heads, size, value_size=None, block=4, dtype=torch.float32, seed=0):
        make = torch.Generator().manual_seed(seed)
        value_size = value_size or size
        self.lens = [length for length, _ in rows]
        counts = [count for _, count in rows]
        widths = [-(-length // block) for length in self.lens]
        order = torch.randperm(sum(widths) + 3, generator=make).tolist()
        self.tables = torch.zeros(len(rows), max(widths), dtype=torch.int32)
        for row, width in enumerate(widths):
            self.tables[row, :width] = torch.tensor([order.pop() for _ in range(width)])
        self.cu = [0]
        slots = []
        for row, (length, count) in enumerate(rows):
            self.cu.append(self.cu[-1] + count)
            for position in range(length - count, length):
                slots.append(int(self.tables[row, position // block]) * block + position % block)
        self.slots = torch.tensor(slots)
        depth = max(size, value_size)
        self.kv = torch.randn(2, sum(widths) + 3, block, kv_heads, depth, generator=make).to(dtype)
        total = sum(counts)
        self.q = torch.randn(total, heads, size, generator=make).to(dtype)
        self.k = torch.randn(total, kv_heads, size, generator=make).to(dtype)
        self.v = torch.randn(total, kv_heads, value_size, generator=make).to(dtype)
        self.block = block

    @property
    def rows(self):
        return Rows(self.cu, self.lens, self.tables, self.slots, self.block)

    def spoil(self):
        """Let everything in the pool that is no row's past be what a failed request left."""
        own = torch.zeros(self.kv.shape[1:3], dtype=torch.bool)
        for row, length in enumerate(self.lens):
            for position in range(length):
                own[self.tables[row, position // self.block], position % self.block] = True
        self.kv[:, ~own] = float("nan")

    def ours(self, *scores):
        kv = self.kv.clone()
        write_kv(kv, self.k, self.v, self.slots)
        how = Scores(*scores)
        return attend(self.q, kv, group_rows(self.rows, how.window), self.v.shape[-1], how), kv

    def meaning(self, *scores):
        kv = self.kv.clone()
        return reference.paged_attention(self.q, self.k, self.v, kv, self.rows, Scores(*scores)), kv


ROWS = {
    "one token": [(1, 1)],
    "decodes of odd lengths": [(1, 1), (4, 1), (5, 1), (17, 1)],
    "whole prompts": [(2, 2), (9, 9), (16, 16)],
    "chunks with a past": [(9, 3), (16, 4), (13, 5)],
    "mixed": [(7, 1), (12, 5), (1, 1), (6, 6), (30, 1), (5, 2)],
    "far apart lengths": [(300, 1), (3, 1), (280, 1), (40, 1)],
}
HEADS = [(4, 4), (6, 2), (9, 3), (5, 1)]


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 1, 3, 8, 1000])
def test_equals_the_reference(rows, heads, window):
    case = Case(rows, *heads, size=16)
    ours, ours_kv = case.ours(0.3, window)
    meaning, meaning_kv = case.meaning(0.3, window)
    torch.testing.assert_close(ours, meaning, atol=2e-5, rtol=1e-4)
    assert torch.equal(ours_kv, meaning_kv)
    assert ours.is_contiguous()


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_what_a_failed_request_left_reaches_nobody(rows, softcap):
    case = Case(rows, 4, 2, size=16)
    clean, _ = case.ours(0.3, None, softcap)
    case.spoil()
    assert case.kv.isnan().any()
    spoiled, _ = case.ours(0.3, None, softcap)
    assert torch.equal(spoiled, clean)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_dtypes_softcap_and_sinks(dtype, softcap, has_sinks):
    case = Case(ROWS["mixed"], 6, 2, size=24, dtype=dtype)
    sinks = torch.linspace(-1, 2, 6).to(dtype) if has_sinks else None
    ours, _ = case.ours(24**-0.5, 5, softcap, sinks)
    meaning, _ = case.meaning(24**-0.5, 5, softcap, sinks)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, meaning, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("size", "value_size"), [(24, 16), (16, 24)])
def test_values_of_another_head_size(size, value_size):
    case = Case(ROWS["mixed"], 4, 4, size=size, value_size=value_size)
    ours, _ = case.ours(0.2)
    padded = torch.nn.functional.pad
    depth = max(size, value_size)
    case.k, case.v = padded(case.k, (0, depth - size)), padded(case.v, (0, depth - value_size))
    case.kv[0, ..., size:], case.kv[1, ..., value_size:] = 0, 0
    case.q = padded(case.q, (0, depth - size))
    meaning, _ = case.meaning(0.2)
    assert ours.shape[-1] == value_size
    torch.testing.assert_close(ours, meaning[..., :value_size], atol=2e-5, rtol=1e-4)


def test_long_rows_do_not_pad_short_ones():
    case = Case(ROWS["far apart lengths"], 2, 1, size=8)
    rows = case.rows
    gathered = sum(len(group.blocks) for group in group_rows(rows, None))
    needed = sum(-(-length // case.block) for length in case.lens)
    assert gathered < 1.2 * needed
    assert sum(len(group.blocks) for group in group_rows(rows, 8)) <= 3 * len(case.lens)


def test_a_row_does_not_depend_on_its_neighbours():
    mixed = Case(ROWS["mixed"], 4, 2, size=16)
    together, _ = mixed.ours(0.25)
    begin, end = mixed.cu[4], mixed.cu[5]
    alone = Case(ROWS["mixed"], 4, 2, size=16)
    alone.lens, alone.cu = [mixed.lens[4]], [0, end - begin]
    alone.tables, alone.slots = mixed.tables[4:5], mixed.slots[begin:end]
    alone.q, alone.k, alone.v = (part[begin:end] for part in (mixed.q, mixed.k, mixed.v))
    torch.testing.assert_close(alone.ours(0.25)[0], together[begin:end], atol=1e-6, rtol=1e-6)
