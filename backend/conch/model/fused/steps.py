"""What every native step is told: its rows, its tokens, and where KV lies."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from conch.api import StepBatch
from conch.model.attention import PagedStep
from conch_kernels.cpu.library import Team, prefer_large_pages
from conch_kernels.cpu.native import Step
from conch_kernels.cpu_attention import NativePlan


class NativeSteps:
    """Begins the steps of one decoder, and holds the addresses of its pools."""

    def __init__(self) -> None:
        self._pools: Sequence[torch.Tensor] = ()
        self._addresses = (ctypes.c_void_p * 0)()

    def begin(self, batch: StepBatch, step: PagedStep) -> tuple[Team, Step]:
        """Return who computes a step, and the step: valid while `batch` and this object are kept."""
        plan, pools = step.plan, step.pools
        assert isinstance(plan, NativePlan), "what is fused is only built for a native attention kernel"
        if pools is not self._pools:
            for pool in pools:
                prefer_large_pages(pool, in_use=True)
            self._pools = pools
            self._addresses = (ctypes.c_void_p * len(pools))(*(pool.data_ptr() for pool in pools))
        return plan.team, Step(
            rows=plan.rows,
            input_ids=batch.input_ids.data_ptr(),
            logit_rows=batch.logit_rows.data_ptr(),
            pools=ctypes.addressof(self._addresses),
            pool_half=pools[0].stride(0) * pools[0].element_size(),
            num_logit_rows=batch.logit_rows.shape[0],
        )
