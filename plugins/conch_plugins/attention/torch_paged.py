"""`torch`: paged attention with torch operations, for any device and model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from conch.api import AttentionLayer, AttentionSpec, BuildContext, StepBatch
from conch_kernels.paged import Rows, Scores
from conch_kernels.torch_attention import Group, attend, group_rows, write_kv

if TYPE_CHECKING:
    from conch.api import AttentionKernel


@dataclass(slots=True, eq=False)
class TorchPlan:
    """One step's rows, arranged once for each window that its layers use."""

    rows: Rows
    groups: dict[int | None, list[Group]] = field(default_factory=dict)

    def groups_for(self, window: int | None) -> list[Group]:
        """Return the groups for layers with this window."""
        if window not in self.groups:
            self.groups[window] = group_rows(self.rows, window)
        return self.groups[window]


class TorchPagedAttention:
    """The kernel that runs everywhere: layout ``[2, N, S, K, D]``.

    Rows of one token are gathered and computed together, in groups of like length; longer rows one by one.
    """

    def __init__(self, context: BuildContext) -> None:
        spec = context.model.attention
        self._block_size = spec.block_size
        self._tail = (spec.block_size, spec.num_kv_heads, max(spec.head_size, spec.value_head_size))

    @staticmethod
    def unfit(spec: AttentionSpec) -> list[str]:
        """Reasons why this kernel cannot serve a model."""
        reasons = []
        if spec.pool_dtype != spec.dtype:
            reasons.append(f"it keeps KV in {spec.dtype}, not {spec.pool_dtype}")
        if spec.num_heads % spec.num_kv_heads:
            reasons.append(f"{spec.num_heads} query heads do not divide into {spec.num_kv_heads} KV heads")
        return reasons

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's pool."""
        return (2, num_blocks, *self._tail)

    def plan(self, batch: StepBatch) -> TorchPlan:
        """Look at the rows; they are arranged when the first layer of each window comes."""
        rows = Rows(
            batch.cu_query.tolist(),
            batch.seq_lens.tolist(),
            batch.block_tables,
            batch.slot_mapping,
            self._block_size,
        )
        return TorchPlan(rows)

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: AttentionLayer,
        plan: TorchPlan,
    ) -> torch.Tensor:
        """Write key and value into the pool and attend."""
        write_kv(layer.kv, key, value, plan.rows.slot_mapping)
        groups = plan.groups_for(layer.window)
        scores = Scores(layer.scale, layer.window, layer.softcap, layer.sinks)
        return attend(query, layer.kv, groups, value.shape[-1], scores)


if TYPE_CHECKING:
    _: type[AttentionKernel] = TorchPagedAttention
