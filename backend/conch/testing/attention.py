"""What every attention kernel promises, against a dense softmax that is computed here."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from conch.api import AttentionKernel, AttentionLayer, AttentionSpec, BuildContext, StepBatch
from conch.testing.context import SMALL_ATTENTION, make_context

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3, "int8": 8e-2}
NUM_BLOCKS = 48


@dataclass(eq=False)
class Tokens:
    """One sequence: its block table, and all queries, keys and values so far."""

    table: list[int]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    computed: int = 0


Row = tuple[Tokens, int]
"""A sequence, and how many of its next tokens to compute."""


@dataclass(eq=False)
class Bench:
    """A kernel with one layer's pool, and sequences whose every token can be checked.

    Attributes
    ----------
    window, softcap, sinks
        As in `AttentionLayer`.
    """

    kernel: AttentionKernel
    spec: AttentionSpec
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    def __post_init__(self) -> None:
        """Fill the pool with what a failed request may leave: it spoils every result it gets into."""
        shape, dtype = self.kernel.kv_shape(NUM_BLOCKS), getattr(torch, self.spec.pool_dtype)
        pool = torch.full(shape, _spoilt(dtype), dtype=dtype, device=self.spec.device)
        scale = 1 / math.sqrt(self.spec.head_size)
        self.layer = AttentionLayer(0, pool, scale, self.spec.windows[0], self.softcap, self.sinks)
        self._free = random.Random(2).sample(range(NUM_BLOCKS), NUM_BLOCKS)

    def sequence(self, length: int) -> Tokens:
        """Return a new sequence with blocks in no order."""
        blocks = -(-length // self.spec.block_size)
        table, self._free = self._free[:blocks], self._free[blocks:]
        spec = self.spec
        return Tokens(
            table,
            self._random(length, spec.num_heads, spec.head_size),
            self._random(length, spec.num_kv_heads, spec.head_size),
            self._random(length, spec.num_kv_heads, spec.value_head_size),
        )

    def step(self, *rows: Row) -> None:
        """Compute the next `count` tokens of each sequence in one batch, and check them."""
        self.attend(rows, self.kernel.plan(self.batch(rows)))

    def attend(self, rows: Sequence[Row], plan: object) -> None:
        """Do a step that is planned already, and check its output."""
        spans = _spans(rows)
        query, key, value = (
            torch.cat([getattr(seq, name)[start:end] for seq, start, end in spans])
            for name in ("query", "key", "value")
        )
        output = self.kernel.run(query, key, value, self.layer, plan)
        assert output.shape == (len(query), self.spec.num_heads, self.spec.value_head_size)
        assert output.dtype == query.dtype and output.is_contiguous()
        tolerance = max(TOLERANCE[self.spec.dtype], TOLERANCE[self.spec.pool_dtype])
        wanted = torch.cat([self._dense(seq, start, end) for seq, start, end in spans])
        torch.testing.assert_close(output.float().cpu(), wanted, atol=tolerance, rtol=tolerance)
        for seq, _, end in spans:
            seq.computed = end

    def give_up_behind(self, seq: Tokens) -> None:
        """Put a spoilt block in place of those that no token to come can see."""
        assert self.layer.window is not None, "without a window every block is seen"
        for index in range((seq.computed - self.layer.window + 1) // self.spec.block_size):
            seq.table[index] = self._free[0]

    def batch(self, rows: Sequence[Row]) -> StepBatch:
        """Return the batch of a step."""
        return _batch(_spans(rows), self.spec)

    def _random(self, *shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=self.generator)
        return values.to(device=self.spec.device, dtype=getattr(torch, self.spec.dtype))

    def _dense(self, seq: Tokens, start: int, end: int) -> torch.Tensor:
        """Attention of queries ``[start, end)`` over all keys up to each, in float64."""
        group = self.spec.num_heads // self.spec.num_kv_heads
        query = seq.query[start:end].double().cpu()
        key, value = (t[:end].double().cpu().repeat_interleave(group, dim=1) for t in (seq.key, seq.value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * self.layer.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        behind = torch.arange(start, end)[:, None] - torch.arange(end)[None, :]
        seen = behind >= 0
        if self.layer.window is not None:
            seen &= behind < self.layer.window
        scores = scores.masked_fill(~seen, -math.inf)
        if self.sinks is not None:
            sink = self.sinks.double().cpu()[:, None, None].expand(-1, end - start, 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = torch.softmax(scores, dim=-1)[:, :, :end]
        return torch.einsum("hqk,khd->qhd", weights, value).float()


def _spoilt(dtype: torch.dtype) -> float:
    """Return what spoils all that it gets into: NaN, or bytes that are NaN as the floats of scales."""
    return math.nan if dtype.is_floating_point else -1


Span = tuple[Tokens, int, int]


def _spans(rows: Sequence[Row]) -> list[Span]:
    return [(seq, seq.computed, seq.computed + count) for seq, count in rows]


def _batch(spans: list[Span], spec: AttentionSpec) -> StepBatch:
    size, device = spec.block_size, spec.device
    counts = [end - start for _, start, end in spans]
    widest = max(-(-end // size) for _, _, end in spans)
    tables = [(seq.table[: -(-end // size)] + [0] * widest)[:widest] for seq, _, end in spans]
    places = [(seq, position) for seq, start, end in spans for position in range(start, end)]
    slots = [seq.table[position // size] * size + position % size for seq, position in places]
    ends = list(itertools.accumulate(counts))

    def tensor(values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return StepBatch(
        input_ids=torch.zeros(ends[-1], dtype=torch.int64, device=device),
        positions=tensor([position for _, position in places], torch.int64),
        cu_query=tensor([0, *ends], torch.int32),
        seq_lens=tensor([end for _, _, end in spans], torch.int32),
        block_tables=tensor(tables, torch.int32),
        slot_mapping=tensor(slots, torch.int64),
        logit_rows=tensor([end - 1 for end in ends], torch.int64),
        max_query=max(counts),
        max_seq_len=max(end for _, _, end in spans),
    )


class AttentionKernelContract:
    """Inherit, implement `build` and `unfit`, and let pytest collect the subclass.

    A case that the kernel says it is unfit for is skipped, with its reasons.
    """

    device = "cpu"

    def build(self, context: BuildContext) -> AttentionKernel:
        """Build the kernel under test for ``context.model.attention``."""
        raise NotImplementedError

    def unfit(self, spec: AttentionSpec) -> list[str]:
        """Ask the kernel under test what keeps it from serving a model."""
        raise NotImplementedError

    def bench(
        self,
        heads: tuple[int, int, int] = (4, 2, 8),
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        **changes: object,
    ) -> Bench:
        """Return a bench of (H, K, D) heads; `changes` are fields of `AttentionSpec`."""
        fields = {
            "num_heads": heads[0],
            "num_kv_heads": heads[1],
            "head_size": heads[2],
            "value_head_size": heads[2],
            "softcap": softcap is not None,
            "sinks": sinks is not None,
            "device": self.device,
            **changes,
        }
        spec = replace(SMALL_ATTENTION, **fields)  # type: ignore[arg-type]
        if reasons := self.unfit(spec):
            pytest.skip("; ".join(reasons))
        return Bench(self.build(make_context(attention=spec)), spec, softcap, sinks)

    def test_is_a_kernel(self) -> None:
        """It has the methods of the seam, and a pool whose dim 1 counts blocks."""
        bench = self.bench()
        assert isinstance(bench.kernel, AttentionKernel)
        assert bench.kernel.kv_shape(7)[:2] == (2, 7)

    @pytest.mark.parametrize("heads", [(1, 1, 8), (4, 4, 16), (9, 3, 64), (8, 1, 32), (5, 5, 24)], ids=str)
    def test_head_counts_and_sizes(self, heads: tuple[int, int, int]) -> None:
        """Query heads share KV heads in order."""
        bench = self.bench(heads)
        seq, other = bench.sequence(11), bench.sequence(3)
        bench.step((seq, 10), (other, 2))
        bench.step((seq, 1), (other, 1))

    @pytest.mark.parametrize("block_size", [1, 4, 16, 32])
    def test_block_sizes(self, block_size: int) -> None:
        """Prompts that end before, at and after a block's end."""
        for length in (block_size, block_size + 1, max(2, block_size - 1)):
            bench = self.bench(block_size=block_size)
            seq = bench.sequence(length)
            bench.step((seq, length - 1))
            bench.step((seq, 1))

    @pytest.mark.parametrize("chunk", [1, 3, 4, 5, 8])
    def test_a_prompt_in_chunks(self, chunk: int) -> None:
        """Chunk borders may lie anywhere; the last chunk may be one token."""
        bench = self.bench()
        seq = bench.sequence(17)
        while seq.computed < 17:
            bench.step((seq, min(chunk, 17 - seq.computed)))

    def test_prompts_chunks_and_decodes_in_one_batch(self) -> None:
        """Rows of every kind side by side, in any order."""
        bench = self.bench()
        decode, chunked, verify = bench.sequence(30), bench.sequence(40), bench.sequence(20)
        bench.step((decode, 21), (chunked, 5), (verify, 9))
        for _ in range(4):
            bench.step((chunked, 7), (decode, 1), (verify, 2), (bench.sequence(3), 3))

    @pytest.mark.parametrize("window", [1, 3, 4, 9, 64])
    def test_sliding_window(self, window: int) -> None:
        """A query sees so many tokens, itself included."""
        bench = self.bench(windows=(window,))
        seq, other = bench.sequence(24), bench.sequence(12)
        bench.step((seq, 13), (other, 2))
        bench.step((seq, 6), (other, 1))
        bench.step((seq, 1), (other, 9))

    @pytest.mark.parametrize("window", [1, 3, 4, 9, 64])
    def test_blocks_behind_the_window_are_not_read(self, window: int) -> None:
        """They may be somebody else's: the table names a spoilt block in their place."""
        bench = self.bench(windows=(window,))
        seq, other = bench.sequence(40), bench.sequence(27)
        for count, others in ((13, 9), (6, 1), (1, 5), (1, 1), (17, 1), (1, 9)):
            bench.step((seq, count), (other, others))
            bench.give_up_behind(seq)
            bench.give_up_behind(other)

    @pytest.mark.parametrize("softcap", [2.0, 50.0])
    def test_softcap(self, softcap: float) -> None:
        """Scores are capped before the softmax."""
        bench = self.bench(softcap=softcap)
        seq = bench.sequence(10)
        bench.step((seq, 9))
        bench.step((seq, 1))

    def test_sinks(self) -> None:
        """One more logit for each head, that takes no value."""
        bench = self.bench(sinks=torch.tensor([0.5, -1.0, 3.0, 0.0], device=self.device))
        seq = bench.sequence(10)
        bench.step((seq, 9))
        bench.step((seq, 1))

    def test_values_of_another_head_size(self) -> None:
        """As in latent attention."""
        bench = self.bench(heads=(4, 2, 24), value_head_size=16)
        seq = bench.sequence(10)
        bench.step((seq, 9))
        bench.step((seq, 1))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision(self, dtype: str) -> None:
        """Within the precision of the inputs."""
        bench = self.bench(dtype=dtype)
        seq, other = bench.sequence(40), bench.sequence(5)
        bench.step((seq, 39), (other, 1))
        bench.step((seq, 1), (other, 1))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_int8_kv(self, dtype: str) -> None:
        """Within what rounding to 8 bits costs."""
        bench = self.bench(dtype=dtype, kv_cache_dtype="int8")
        assert bench.layer.kv.dtype is torch.int8
        seq, other = bench.sequence(40), bench.sequence(5)
        bench.step((seq, 39), (other, 1))
        bench.step((seq, 1), (other, 1))

    @pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
    def test_a_copied_block_is_a_copy(self, kv_cache_dtype: str) -> None:
        """Dim 1 of the pool counts blocks: copying there copies KV, scales included."""
        bench = self.bench(kv_cache_dtype=kv_cache_dtype)
        seq, spare = bench.sequence(10), bench.sequence(4)
        bench.step((seq, 6))
        source, target = seq.table[1], spare.table[0]
        bench.layer.kv[:, target] = bench.layer.kv[:, source]
        bench.layer.kv[:, source] = _spoilt(bench.layer.kv.dtype)
        seq.table[1] = target
        bench.step((seq, 1))
        bench.step((seq, 3))

    def test_layers_share_a_plan_and_nothing_else(self) -> None:
        """One plan serves pools and constants of several layers."""
        bench = self.bench(windows=(None, 2))
        other = Bench(
            bench.kernel, replace(bench.spec, windows=(2,)), generator=torch.Generator().manual_seed(9)
        )
        one, two = bench.sequence(9), other.sequence(9)
        assert one.table == two.table and not torch.equal(one.query, two.query)
        for count in (5, 1, 3):
            plan = bench.kernel.plan(bench.batch([(one, count)]))
            bench.attend([(one, count)], plan)
            other.attend([(two, count)], plan)
