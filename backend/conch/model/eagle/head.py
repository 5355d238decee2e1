"""What an EAGLE head is given, what it makes of that, and which make of it runs."""

from __future__ import annotations

from typing import Protocol

from conch.api import AttentionKernel, ModelSpec, StepBatch
from conch.model.attention import PagedStep
from conch.model.eagle.fused import FusedHead, can_fuse
from conch.model.eagle.layout import HeadLayout
from conch.model.eagle.parts import HeadWeights
from conch.model.eagle.plain import PlainHead
from conch.model.eagle.slots import Given, Slots
from conch_kernels.cpu_attention import NativeAttention


class EagleHead(Protocol):
    """Computes slots of packed rows. Slot i is made of the target's state at token i and of token i + 1."""

    def run(self, batch: StepBatch, given: Given, step: PagedStep) -> Slots:
        """Compute the KV of all slots, and the rest of those that `batch.logit_rows` names."""


def build_head(
    layout: HeadLayout, weights: HeadWeights, kernel: AttentionKernel, spec: ModelSpec
) -> EagleHead:
    """Build a head.

    Parameters
    ----------
    layout, weights
        What it is.
    kernel
        Its attention; where that is native, so is all of it.
    spec
        The head as a model of one layer.
    """
    if isinstance(kernel, NativeAttention) and can_fuse(layout, weights):
        return FusedHead(layout, weights, kernel, spec)
    return PlainHead(layout, weights, kernel, spec)
