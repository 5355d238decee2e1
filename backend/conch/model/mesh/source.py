"""Where a rank's parameters come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from conch.model.mesh.split import Range

Cuts = Mapping[int, tuple[Range, ...]]
"""For each dimension that is not taken whole, the ranges of it that are, one behind the other."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a parameter is of the whole model's.

    Attributes
    ----------
    name
        Of the parameter in transformers' module of the whole model.
    shape
        Of the whole tensor.
    cuts
        What is taken of it.
    """

    name: str
    shape: tuple[int, ...]
    cuts: Cuts = field(default_factory=dict)

    def ranges(self, dim: int) -> tuple[Range, ...]:
        """Return what is taken of a dimension."""
        return self.cuts.get(dim, ((0, self.shape[dim]),))

    def row(self, index: int) -> Source:
        """Return the same of one entry of dimension 0 only."""
        return Source(self.name, self.shape, {**self.cuts, 0: ((index, index + 1),)})


def narrow(module: Any, name: str, dim: int, ranges: Sequence[Range]) -> None:  # noqa: ANN401
    """Replace a parameter by a part of it, which remembers where it was taken from."""
    whole = getattr(module, name, None)
    if whole is None:
        return
    shape = list(whole.shape)
    shape[dim] = sum(last - first for first, last in ranges)
    narrow: Any = torch.nn.Parameter(
        torch.empty(shape, dtype=whole.dtype, device="meta"), requires_grad=False
    )
    narrow.conch_cuts = {**getattr(whole, "conch_cuts", {}), dim: tuple(ranges)}
    narrow.conch_shape = getattr(whole, "conch_shape", tuple(whole.shape))
    setattr(module, name, narrow)


def source_of(name: str, weight: Any) -> Source:  # noqa: ANN401 - a tensor that `narrow` has marked
    """Return where a parameter comes from, by the name that it has in the whole model."""
    return Source(
        name, getattr(weight, "conch_shape", tuple(weight.shape)), getattr(weight, "conch_cuts", {})
    )
