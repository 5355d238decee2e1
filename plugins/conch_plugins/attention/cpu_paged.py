"""`cpu`: paged attention in C++, for fp32 and bf16 on CPUs; KV in the same or int8."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from conch.api import AttentionLayer, AttentionSpec, BuildContext, StepBatch
from conch_kernels.cpu.build import BuildError
from conch_kernels.cpu.library import library
from conch_kernels.cpu_attention import DTYPES, KvLayout, NativeAttention, NativePlan, paged_attention
from conch_kernels.paged import Scores

if TYPE_CHECKING:
    from conch.api import AttentionKernel


class CpuPagedAttention(NativeAttention):
    """Tiles of queries over KV in panels; the kernel that the fused decoder runs inside its step."""

    def __init__(self, context: BuildContext) -> None:
        spec = context.model.attention
        layout = KvLayout(
            spec.num_kv_heads,
            spec.head_size,
            spec.value_head_size,
            spec.block_size,
            spec.pool_dtype == "int8",
        )
        super().__init__(spec.num_heads, layout)

    @staticmethod
    def unfit(spec: AttentionSpec) -> list[str]:
        """Reasons why this kernel cannot serve a model. Compiles the kernel where that is not done yet."""
        reasons = []
        if torch.device(spec.device).type != "cpu":
            reasons.append(f"it runs on CPUs, not on {spec.device}")
        if spec.dtype not in (known := [str(dtype).removeprefix("torch.") for dtype in DTYPES]):
            reasons.append(f"it computes in {' or '.join(known)}, not {spec.dtype}")
        if spec.pool_dtype not in (spec.dtype, "int8"):
            reasons.append(f"it keeps KV in {spec.dtype} or int8, not {spec.pool_dtype}")
        if spec.num_heads % spec.num_kv_heads:
            reasons.append(f"{spec.num_heads} query heads do not divide into {spec.num_kv_heads} KV heads")
        if reasons:
            return reasons
        try:
            library()
        except BuildError as error:
            return [str(error)]
        return []

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's pool."""
        return self.layout.pool_shape(num_blocks)

    def plan(self, batch: StepBatch) -> NativePlan:
        """Show native code where the rows are."""
        return self.plan_rows(
            (batch.cu_query, batch.seq_lens, batch.block_tables, batch.slot_mapping, batch.positions)
        )

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: AttentionLayer,
        plan: NativePlan,
    ) -> torch.Tensor:
        """Write key and value into the pool and attend."""
        scores = Scores(layer.scale, layer.window, layer.softcap, layer.sinks)
        return paged_attention(query, key, value, layer.kv, plan, scores)


if TYPE_CHECKING:
    _: type[AttentionKernel] = CpuPagedAttention
