"""One packed matrix and products with it, for what is not a whole decoder."""

from __future__ import annotations

import ctypes

import torch

from conch_kernels.cpu.library import Team, library, prefer_large_pages
from conch_kernels.cpu.native import Matrix
from conch_kernels.cpu.packing import FORMATS, pack, packed_bytes

_LINE = 64
_AHEAD = 1 << 20  # kernels fetch what comes after a panel, and may do so after the last one


class PackedMatrix:
    """A linear layer without bias.

    Parameters
    ----------
    weight : [columns, depth]
        fp32 or bf16; copied.
    team
        Who multiplies.
    """

    def __init__(self, weight: torch.Tensor, team: Team) -> None:
        columns, depth = weight.shape
        size = packed_bytes(columns, depth, weight.dtype)
        self._memory = torch.empty(size + _LINE + _AHEAD, dtype=torch.uint8)
        prefer_large_pages(self._memory, in_use=False)
        start = -self._memory.data_ptr() % _LINE
        panels = self._memory[start : start + size]
        pack(weight, panels, team)
        self._team, self._dtype, self._columns = team, weight.dtype, columns
        self._matrix = Matrix(
            panels=panels.data_ptr(), depth=depth, columns=columns, format=FORMATS[weight.dtype]
        )

    def __call__(self, left: torch.Tensor) -> torch.Tensor:
        """Return float32 [rows, columns] of `left` [rows, depth], which has the dtype of the weight."""
        left = left.contiguous()
        assert left.dtype is self._dtype
        product = torch.empty(left.shape[0], self._columns)
        library().conch_multiply(
            self._team.handle,
            ctypes.c_void_p(left.data_ptr()),
            ctypes.byref(self._matrix),
            ctypes.c_void_p(product.data_ptr()),
            left.shape[0],
            FORMATS[self._dtype],
        )
        return product
