"""Quantised weights in panels, made from floats or from the blocks of a GGUF file; see quantised.h.

A block of GGUF and a group of a panel hold the same: 32 numbers down one column, an fp16 scale, perhaps an
fp16 minimum. So what a file says is kept to the bit; only the order of its bytes changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from conch_kernels.cpu.packing import PANEL, panels_of

GROUP: Final = 32


@dataclass(frozen=True)
class GroupFormat:
    """Groups of 32 numbers that share a scale.

    Attributes
    ----------
    number
        In `Matrix.format` of the C++ side.
    kind
        What GGUF calls it.
    bits
        Of a number.
    halves
        fp16 values before the numbers of a group: its scale, and its minimum if it has one.
    """

    number: int
    kind: str
    bits: int
    halves: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one group of one column."""
        return 2 * self.halves + GROUP * self.bits // 8

    def panel_bytes(self, depth: int) -> int:
        """Bytes of a panel of that depth."""
        return depth // GROUP * PANEL * self.block_bytes


U8: Final = GroupFormat(2, "Q8_0", 8, 1)
U4: Final = GroupFormat(3, "Q4_0", 4, 1)
U4M: Final = GroupFormat(4, "Q4_1", 4, 2)

FORMAT_OF_KIND: Final = {layout.kind: layout for layout in (U8, U4, U4M)}


def repack(blocks: torch.Tensor, layout: GroupFormat) -> torch.Tensor:
    """Put the blocks of a GGUF file into panels.

    Parameters
    ----------
    blocks
        uint8 [columns, depth / 32 * block bytes], rows as the file has them.
    layout
        Of those blocks.

    Returns
    -------
    torch.Tensor
        uint8 [panels, panel bytes]; columns that fill up the last panel are 0.
    """
    groups = blocks.reshape(blocks.shape[0], -1, layout.block_bytes)
    halves, numbers = groups[..., : 2 * layout.halves], groups[..., 2 * layout.halves :]
    if layout is U8:
        numbers = numbers ^ 0x80  # from signed to a zero point of 128
    parts = _side_by_side(halves, torch.int16), _side_by_side(numbers, torch.int32)
    return torch.cat(parts, dim=2).flatten(1)


def quantise(weight: torch.Tensor, layout: GroupFormat) -> torch.Tensor:
    """Quantise weight [columns, depth], of any float type, into panels as `repack` returns them."""
    return repack(blocks_of(weight, layout), layout)


def blocks_of(weight: torch.Tensor, layout: GroupFormat) -> torch.Tensor:
    """Quantise weight [columns, depth] to the blocks that a GGUF file would have: uint8 [columns, bytes].

    The rules are those of GGUF: the largest magnitude becomes 127 in 8 bits and -8 in 4, and with a minimum
    the range is cut into 15 equal steps.
    """
    groups = weight.float().reshape(weight.shape[0], -1, GROUP)
    halves, numbers = _RULES[layout.kind](groups)
    if layout.bits == 4:
        low, high = numbers.chunk(2, dim=2)
        numbers = low | high << 4
    return torch.cat([halves.half().view(torch.uint8), numbers], dim=2).flatten(1)


def dequantise(panels: torch.Tensor, layout: GroupFormat, columns: int) -> torch.Tensor:
    """Return the weights that `panels` stand for: float32 [columns, depth]."""
    count = panels.shape[0]
    groups = panels.view(count, -1, PANEL * layout.block_bytes)
    head = 2 * PANEL * layout.halves
    halves = groups[..., :head].contiguous().view(torch.float16).float()
    halves = halves.view(count, -1, layout.halves, 1, PANEL)
    numbers = groups[..., head:].reshape(*groups.shape[:2], -1, PANEL, 4).transpose(3, 4)
    if layout.bits == 4:
        numbers = torch.cat([numbers & 15, numbers >> 4], dim=2)
    zero = {U8: 128, U4: 8, U4M: 0}[layout]
    numbers = numbers.flatten(2, 3).to(torch.float32)  # [panels, groups, 32, PANEL]
    weights = (numbers - zero) * halves[:, :, 0]
    if layout is U4M:
        weights = weights + halves[:, :, 1]
    return weights.permute(0, 3, 1, 2).flatten(0, 1).flatten(1)[:columns].contiguous()


def _side_by_side(values: torch.Tensor, item: torch.dtype) -> torch.Tensor:
    """Interleave the columns of each panel: uint8 [columns, groups, n] -> [panels, groups, PANEL * n]."""
    items = values.contiguous().view(item)
    columns, groups, count = items.shape
    missing = panels_of(columns) * PANEL - columns
    items = torch.nn.functional.pad(items, (0, 0, 0, 0, 0, missing))
    laid = items.view(-1, PANEL, groups, count).permute(0, 2, 3, 1).contiguous()
    return laid.flatten(2).view(torch.uint8)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0, 1 / scale)


def _eight_bits(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = groups.abs().amax(dim=2, keepdim=True) / 127
    return scale, (groups * _inverse(scale)).round().to(torch.int8).view(torch.uint8)


def _four_bits(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    scale = largest / -8
    return scale, (groups * _inverse(scale) + 8.5).clamp(0, 15).to(torch.uint8)


def _four_bits_and_minimum(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    minimum, maximum = groups.aminmax(dim=2, keepdim=True)
    scale = (maximum - minimum) / 15
    numbers = ((groups - minimum) * _inverse(scale) + 0.5).clamp(0, 15).to(torch.uint8)
    return torch.cat([scale, minimum], dim=2), numbers


_RULES: Final[dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]] = {
    U8.kind: _eight_bits,
    U4.kind: _four_bits,
    U4M.kind: _four_bits_and_minimum,
}
