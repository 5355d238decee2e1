"""One layer's attention in the CPU kernel and in the reference, over the same random rows."""

from __future__ import annotations

import math

import torch

from conch_kernels import reference
from conch_kernels.cpu_attention import LANES, KvLayout, NativeAttention, paged_attention
from conch_kernels.paged import Rows, Scores

LESSER_CPUS = {"avx2": ("-mno-avx512f",), "plain": ("-march=x86-64",)}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


class Case:
    """Random packed rows over two pools, ours and the reference's, that hold NaN wherever no row's past is.

    The past is written by the kernels themselves, in a step of its own.
    """

    is_int8 = False

    def __init__(self, rows, heads, size, value_size=None, block=16, dtype=torch.float32, seed=0):
        make = torch.Generator().manual_seed(seed)
        value_size = value_size or size
        num_heads, kv_heads = heads
        widths = [-(-length // block) for length, _ in rows]
        order = torch.randperm(sum(widths) + 3, generator=make).tolist()
        self.tables = torch.zeros(len(rows), max(widths) + 2, dtype=torch.int32)
        for row, width in enumerate(widths):
            self.tables[row, :width] = torch.tensor([order.pop() for _ in range(width)])
        self.lengths, self.counts, self.block = [n for n, _ in rows], [count for _, count in rows], block
        total = sum(self.lengths)
        self.q = torch.randn(total, num_heads, size, generator=make).to(dtype)
        self.k = torch.randn(total, kv_heads, size, generator=make).to(dtype)
        self.v = torch.randn(total, kv_heads, value_size, generator=make).to(dtype)
        self.layout = KvLayout(kv_heads, size, value_size, block, self.is_int8)
        self.attention = NativeAttention(num_heads, self.layout)
        blocks, depth = sum(widths) + 3, max(size, value_size)
        self.kv = self.unwritten_pool(blocks, dtype)
        self.plain_kv = torch.full((2, blocks, block, kv_heads, depth), math.nan, dtype=torch.float32)

    def unwritten_pool(self, blocks, dtype):
        return torch.full(self.layout.pool_shape(blocks), math.nan, dtype=dtype)

    def kept(self, slots, k, v):
        """Return what the reference is to take for the keys and values of these slots."""
        return k, v

    def spans(self, past):
        """Rows as (row, start, end): what was computed before this step, or in it."""
        for row, (length, count) in enumerate(zip(self.lengths, self.counts, strict=True)):
            start, end = (0, length - count) if past else (length - count, length)
            if end > start:
                yield row, start, end

    def step(self, past, scores, cut=None):
        """Run both kernels over past or present; returns ours and the reference's output."""
        spans = list(self.spans(past))
        begins = [sum(self.lengths[:row]) for row, _, _ in spans]
        tokens = torch.cat(
            [torch.arange(b + s, b + e) for b, (_, s, e) in zip(begins, spans, strict=True)]
            or [torch.empty(0, dtype=torch.int64)]
        )
        positions = torch.cat([torch.arange(s, e) for _, s, e in spans])
        owners = torch.cat([torch.full((e - s,), row) for row, s, e in spans])
        slots = self.tables[owners, positions // self.block].long() * self.block + positions % self.block
        cu_query = torch.tensor([0, *torch.tensor([e - s for _, s, e in spans]).cumsum(0).tolist()])
        lengths = torch.tensor([end for _, _, end in spans])
        tables = self.tables[[row for row, _, _ in spans]]
        self.plan = self.attention.plan_rows((cu_query.int(), lengths.int(), tables, slots, positions))
        q, k, v = self.q[tokens], self.k[tokens], self.v[tokens]
        ours = paged_attention(q, k, v, self.kv, self.plan, scores)
        rows = Rows(cu_query.tolist(), lengths.tolist(), tables, slots, self.block)
        k, v = self.kept(slots, k, v)
        depth = self.plain_kv.shape[-1]
        pad = torch.nn.functional.pad
        q, k, v = (pad(part, (0, depth - part.shape[-1])) for part in (q, k, v))
        meaning = reference.paged_attention(q, k, v, self.plain_kv, rows, scores)
        return ours, meaning[..., : ours.shape[-1]]

    def check(self, *arguments):
        scores = Scores(*arguments)
        if any(self.spans(past=True)):
            self.step(True, scores)
        ours, meaning = self.step(False, scores)
        assert ours.dtype == self.q.dtype and ours.is_contiguous()
        assert not meaning.isnan().any()
        tolerance = TOLERANCE[ours.dtype]
        torch.testing.assert_close(ours, meaning, atol=tolerance, rtol=tolerance)
        return ours


class Int8Case(Case):
    """KV is int8 in our pool; the reference computes with the numbers that are found there."""

    is_int8 = True

    def unwritten_pool(self, blocks, dtype):
        return torch.full(self.layout.pool_shape(blocks), -1, dtype=torch.int8)  # as floats NaN: the scales

    def kept(self, slots, k, v):
        keys, values = self.decoded()
        block, offset = slots // self.block, slots % self.block
        return keys[block, :, offset, : k.shape[-1]], values[block, :, offset, : v.shape[-1]]

    def decoded(self):
        """Return all keys and values of the pool, [N, K, S, D], as kv.h says that they lie."""
        _, blocks, heads, tokens, width = self.kv.shape
        depth, fold = width - 4, 4
        groups = self.kv.view(2, blocks, heads, tokens // LANES, LANES * width)
        scales = groups[..., LANES * depth :].contiguous().view(torch.float32)
        keys, values = groups[..., : LANES * depth].float()
        keys = keys.unflatten(-1, (depth // fold, LANES, fold)).transpose(-3, -2).flatten(-2)
        values = values.unflatten(-1, (LANES // fold, depth, fold)).transpose(-2, -1).flatten(-3, -2)
        return (
            (part * scale[..., None]).flatten(2, 3)
            for part, scale in zip((keys, values), scales, strict=True)
        )


ROWS = {
    "one token": [(1, 1)],
    "decodes of odd lengths": [(1, 1), (15, 1), (16, 1), (17, 1), (33, 1)],
    "whole prompts": [(2, 2), (16, 16), (39, 39)],
    "chunks with a past": [(9, 3), (70, 33), (45, 17)],
    "mixed": [(7, 1), (12, 5), (1, 1), (6, 6), (130, 1), (5, 2)],
    "far apart lengths": [(300, 1), (3, 1), (280, 20)],
}
