"""How the matrices of a model are kept: as elements of its dtype, or in groups that share a scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from conch.model.fused.blueprint import MatrixPart
from conch.model.gguf_weights import RawTensor
from conch_kernels.cpu.library import Team
from conch_kernels.cpu.packing import FORMATS, interleave, pack, packed_bytes, panels_of
from conch_kernels.cpu.quantising import FORMAT_OF_KIND, GROUP, U8, GroupFormat, quantise, repack


class Source(Protocol):
    """The parameters of a checkpoint."""

    def dense(self, name: str) -> torch.Tensor:
        """Return a parameter as floats."""

    def kind(self, name: str) -> str | None:
        """Return how a matrix is quantised; None where it is not, or cannot be served so."""

    def raw(self, name: str) -> RawTensor | None:
        """Return a matrix as it is stored; None where `kind` is."""


class Matrices(Protocol):
    """Puts matrices into the memory that kernels read."""

    def size(self, part: MatrixPart) -> int:
        """Bytes that a matrix takes."""

    def write(self, part: MatrixPart, room: torch.Tensor) -> int:
        """Write a matrix to `room`, uint8 [size]; returns the number of its format."""


class DenseMatrices:
    """Elements of one dtype.

    Parameters
    ----------
    source, shapes
        The parameters, and their shapes by name.
    dtype
        Of the elements: fp32 or bf16.
    team
        Who packs.
    """

    def __init__(
        self, source: Source, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, team: Team
    ) -> None:
        self._source, self._shapes, self._dtype, self._team = source, shapes, dtype, team

    def size(self, part: MatrixPart) -> int:
        """Bytes that a matrix takes."""
        return packed_bytes(*shape_of(part, self._shapes), self._dtype)

    def write(self, part: MatrixPart, room: torch.Tensor) -> int:
        """Write a matrix to `room`."""
        pack(
            stacked(part, [self._source.dense(name).to(self._dtype) for name in part.weights]),
            room,
            self._team,
        )
        return FORMATS[self._dtype]


class GroupedMatrices:
    """Whole numbers in groups of 32: 8 bits made here or, with `as_stored`, what the file has where it may.

    Where the depth of a matrix is no multiple of the group it stays as `dense` has it.

    Parameters
    ----------
    source, shapes
        The parameters, and their shapes by name.
    dense
        For what cannot be grouped.
    as_stored
        Whether blocks of the checkpoint are kept to the bit.
    """

    def __init__(
        self, source: Source, shapes: Mapping[str, tuple[int, ...]], dense: DenseMatrices, as_stored: bool
    ) -> None:
        self._source, self._shapes, self._dense, self._as_stored = source, shapes, dense, as_stored

    def size(self, part: MatrixPart) -> int:
        """Bytes that a matrix takes."""
        columns, depth = shape_of(part, self._shapes)
        if depth % GROUP:
            return self._dense.size(part)
        return panels_of(columns) * self._layout(part).panel_bytes(depth)

    def write(self, part: MatrixPart, room: torch.Tensor) -> int:
        """Write a matrix to `room`."""
        if shape_of(part, self._shapes)[1] % GROUP:
            return self._dense.write(part, room)
        layout = self._layout(part)
        raw = [self._source.raw(name) for name in part.weights] if self._kind(part) else []
        if raw:
            panels = repack(stacked(part, [one.blocks for one in raw if one]), layout)
        else:
            panels = quantise(stacked(part, [self._source.dense(name) for name in part.weights]), layout)
        room.copy_(panels.flatten())
        return layout.number

    def _layout(self, part: MatrixPart) -> GroupFormat:
        kind = self._kind(part)
        return U8 if kind is None else FORMAT_OF_KIND[kind]

    def _kind(self, part: MatrixPart) -> str | None:
        """Return how a matrix is kept as it is stored; None where its parts are not all of one kind."""
        kinds = {self._source.kind(name) for name in part.weights} if self._as_stored else {None}
        return kinds.pop() if len(kinds) == 1 else None


def shape_of(part: MatrixPart, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Columns and depth of a matrix."""
    parts = [shapes[name] for name in part.weights]
    return sum(shape[0] for shape in parts), parts[0][1]


def stacked(part: MatrixPart, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Put the parts of a matrix, or of its bias, one below the other, in the order of `part`."""
    whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    return interleave(whole) if part.interleaved else whole
