"""A decoder that runs a whole step in one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from conch.api import StepBatch
from conch.model.attention import PagedStep
from conch.model.logits import Logits
from conch_kernels.cpu.library import prefer_large_pages
from conch_kernels.cpu.native import NativeDecoder, Step
from conch_kernels.cpu_attention import NativePlan


class FusedDecoder:
    """Runs packed rows: `conch.model.causal_model.CausalModel`'s other make.

    Parameters
    ----------
    native
        The decoder, its weights packed.
    """

    def __init__(self, native: NativeDecoder) -> None:
        self._native = native
        self._pools: Sequence[torch.Tensor] = ()
        self._addresses = (ctypes.c_void_p * 0)()

    def logits(self, batch: StepBatch, step: PagedStep) -> Logits:
        """Run the step and return the logits of its `logit_rows`."""
        plan = step.plan
        assert isinstance(plan, NativePlan), "a fused decoder is only loaded for a native attention kernel"
        if step.pools is not self._pools:
            for pool in step.pools:
                prefer_large_pages(pool, in_use=True)
            self._pools = step.pools
            self._addresses = (ctypes.c_void_p * len(step.pools))(*(pool.data_ptr() for pool in step.pools))
        values, likeliest = self._native.run(
            plan.team,
            Step(
                rows=plan.rows,
                input_ids=batch.input_ids.data_ptr(),
                logit_rows=batch.logit_rows.data_ptr(),
                pools=ctypes.addressof(self._addresses),
                pool_half=step.pools[0].stride(0) * step.pools[0].element_size(),
                num_logit_rows=batch.logit_rows.shape[0],
            ),
        )
        return Logits(values, likeliest["column"], likeliest["value"])
