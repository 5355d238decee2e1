"""Memory for packed weights."""

from __future__ import annotations

import torch

from conch_kernels.cpu.library import prefer_large_pages


class Arena:
    """One stretch of memory on large pages, handed out from its beginning; also holds what lies elsewhere.

    Parameters
    ----------
    size
        Bytes, each piece rounded up by `rounded`.
    """

    _LINE = 64
    _AHEAD = 1 << 20  # kernels fetch what comes after a matrix, and may do so after the last one

    def __init__(self, size: int) -> None:
        self._memory = torch.empty(size + self._LINE + self._AHEAD, dtype=torch.uint8)
        prefer_large_pages(self._memory, in_use=False)
        self._at = -self._memory.data_ptr() % self._LINE
        self._kept: list[torch.Tensor] = []

    @classmethod
    def rounded(cls, size: int) -> int:
        """Bytes that a piece of `size` takes."""
        return -(-size // cls._LINE) * cls._LINE

    def take(self, size: int) -> torch.Tensor:
        """Hand out the next piece: uint8 [size], at the start of a cache line."""
        start = self._at
        self._at += self.rounded(size)
        return self._memory[start : start + size]

    def keep(self, tensor: torch.Tensor) -> int:
        """Hold on to a tensor that lies elsewhere; returns its address."""
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()
