"""One product of the compiled library, for tests of its kernels."""

from __future__ import annotations

import ctypes

import torch

from conch_kernels.cpu.library import library
from conch_kernels.cpu.packing import FORMATS


def product_of(left, matrix, team, native=None):
    """Multiply rows with a packed matrix; what is not written stays NaN."""
    product = torch.full((left.shape[0], matrix.columns), float("nan"))
    (native or library()).conch_multiply(
        team.handle,
        ctypes.c_void_p(left.data_ptr()),
        ctypes.byref(matrix),
        ctypes.c_void_p(product.data_ptr()),
        left.shape[0],
        FORMATS[left.dtype],
    )
    return product
