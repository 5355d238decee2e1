"""Times attention of one layer after another, by kernel, in turns.

Options: ``{"heads": [H, K, D], "block_size": S}``. Questions: ``{"limits": true}``, answered with GB/s and
GFLOP/s; ``{"rows": [[length, count], ...], "layers": pools to go round, "rounds": N}``, answered with
microseconds a layer by kernel. Each layer has a pool of its own, so that caches are as cold as in a model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lines import serve
from matmul_worker import limits

from conch.api import AttentionKernel, AttentionLayer, AttentionSpec, StepBatch
from conch.testing.context import SMALL_ATTENTION, make_context
from conch_plugins.attention.cpu_paged import CpuPagedAttention
from conch_plugins.attention.torch_paged import TorchPagedAttention

KERNELS = {"cpu": CpuPagedAttention, "torch": TorchPagedAttention}


def batch_of(rows: list[tuple[int, int]], size: int) -> StepBatch:
    """Return a step of rows (length, count), whose blocks lie in no order."""
    lengths, counts = torch.tensor(rows).unbind(1)
    widths = (lengths + size - 1) // size
    order = torch.randperm(int(widths.sum()))
    tables = torch.nn.utils.rnn.pad_sequence(order.split(widths.tolist()), batch_first=True)
    positions = torch.cat([torch.arange(length - count, length) for length, count in rows])
    owners = torch.repeat_interleave(torch.arange(len(rows)), counts)
    slots = tables[owners, positions // size] * size + positions % size
    ends = counts.cumsum(0)
    return StepBatch(
        input_ids=torch.zeros_like(positions),
        positions=positions,
        cu_query=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int(),
        seq_lens=lengths.int(),
        block_tables=tables.int(),
        slot_mapping=slots,
        logit_rows=ends - 1,
        max_query=int(counts.max()),
        max_seq_len=int(lengths.max()),
    )


class Layers:
    """One kernel with the pools of some layers."""

    def __init__(self, kernel: AttentionKernel, num_blocks: int, count: int, head_size: int) -> None:
        self.kernel = kernel
        shape = kernel.kv_shape(num_blocks)
        pools = [torch.ones(shape, dtype=torch.bfloat16) for _ in range(count)]
        self.layers = [AttentionLayer(i, pool, head_size**-0.5) for i, pool in enumerate(pools)]

    def microseconds(self, batch: StepBatch, inputs: list[torch.Tensor]) -> float:
        """Go through all layers once, and return what one took."""
        began = time.perf_counter()
        plan = self.kernel.plan(batch)
        for layer in self.layers:
            self.kernel.run(*inputs, layer, plan)
        return (time.perf_counter() - began) / len(self.layers) * 1e6


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Build the kernels for one shape of heads."""
    heads, kv_heads, head_size = options["heads"]
    size = options["block_size"]
    spec: AttentionSpec = replace(
        SMALL_ATTENTION,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        value_head_size=head_size,
        dtype="bfloat16",
        block_size=size,
    )
    kernels = {name: kernel(make_context(attention=spec)) for name, kernel in KERNELS.items()}

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if question.get("limits"):
            return limits()
        rows = [(length, count) for length, count in question["rows"]]
        batch = batch_of(rows, size)
        tokens = len(batch.positions)
        inputs = [torch.randn(tokens, count, head_size).bfloat16() for count in (heads, kv_heads, kv_heads)]
        num_blocks = int(batch.block_tables.max()) + 1
        with torch.inference_mode():
            sides = {
                name: Layers(kernel, num_blocks, question["layers"], head_size)
                for name, kernel in kernels.items()
            }
            took: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(question["rounds"] + 1):
                for name, side in sides.items():
                    took[name].append(side.microseconds(batch, inputs))
        return {name: statistics.median(each[1:]) for name, each in took.items()}

    return {"threads": torch.get_num_threads()}, answer


if __name__ == "__main__":
    serve(start)
