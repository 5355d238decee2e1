"""KV of what drafts, under the target's block numbers."""

from __future__ import annotations

import torch

from conch.api import AttentionKernel, ModelSpec
from conch.worker.pool import allocate_pools, block_bytes
from conch.worker.scratch import ScratchBlocks


class DraftPool:
    """A pool with as many blocks as the target's, and the scratch blocks behind them.

    Parameters
    ----------
    spec
        What drafts.
    kernel
        Its attention.
    scratch
        Blocks for drafts that are ahead of their request's own.
    """

    def __init__(self, spec: ModelSpec, kernel: AttentionKernel, scratch: ScratchBlocks) -> None:
        self._spec, self._kernel, self._scratch = spec, kernel, scratch
        self._pools: list[torch.Tensor] = []

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return block_bytes(self._spec, self._kernel)

    @property
    def num_scratch_blocks(self) -> int:
        """Blocks besides those of the pool, for drafts that are ahead of their request's blocks."""
        return self._scratch.count

    def allocate(self, num_blocks: int) -> list[torch.Tensor]:
        """Allocate the KV pool, the scratch blocks last; returns it, for whole blocks to be moved in."""
        self._scratch.put_after(num_blocks)
        self._pools = allocate_pools(self._spec, self._kernel, num_blocks + self.num_scratch_blocks)
        return self._pools
