"""Weights in panels; see matrix.h."""

from __future__ import annotations

import ctypes

import torch

from conch_kernels.cpu.library import Team, library

PANEL = 32
FORMATS = {torch.float32: 0, torch.bfloat16: 1}


def panels_of(columns: int) -> int:
    """Panels that hold as many columns."""
    return -(-columns // PANEL)


def packed_bytes(columns: int, depth: int, dtype: torch.dtype) -> int:
    """Bytes of a packed fp32 or bf16 matrix."""
    return panels_of(columns) * PANEL * depth * dtype.itemsize


def pack(weight: torch.Tensor, out: torch.Tensor, team: Team) -> None:
    """Pack weight [columns, depth], fp32 or bf16, into `out`: uint8 [packed_bytes]."""
    columns, depth = weight.shape
    weight = weight.contiguous()
    assert out.is_contiguous() and out.nbytes == packed_bytes(columns, depth, weight.dtype)
    library().conch_pack(
        team.handle,
        ctypes.c_void_p(weight.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        columns,
        depth,
        FORMATS[weight.dtype],
    )


def interleave(weight: torch.Tensor, run: int = 16) -> torch.Tensor:
    """Let the rows of two equal halves alternate in runs: [2 N, ...] -> [2 N, ...], run by run."""
    halves = weight.reshape(2, -1, run, *weight.shape[1:])
    return halves.transpose(0, 1).reshape(weight.shape).contiguous()
