"""What passes between a worker and a head."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """What slots are made of, besides tokens.

    Attributes
    ----------
    values
        The target's states, float32 [T, A, h], or what the head has put out for the slots before, [T, h].
    """

    values: torch.Tensor

    @property
    def from_target(self) -> bool:
        """Whether they are the target's."""
        return self.values.dim() == 3


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """What a head makes of the L slots that somebody asks for.

    Attributes
    ----------
    outputs : float32 [L, h]
        May stand for the state after each.
    logits : float32 [L, V]
        Over the target's vocabulary, -inf where the head cannot draft. Valid until the next call.
    """

    outputs: torch.Tensor
    logits: torch.Tensor


class DraftVocabulary:
    """The target's tokens that a head can draft.

    Parameters
    ----------
    drafted : int64 [D] or None
        They; None for all.
    size
        V.
    """

    def __init__(self, drafted: torch.Tensor | None, size: int) -> None:
        self._drafted = drafted
        self._whole = (
            torch.empty(0, size) if drafted is None else drafted.new_empty(0, size, dtype=torch.float32)
        )

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return logits [L, V] of those that a head has, float32 [L, D]; valid until the next call."""
        if self._drafted is None:
            return values
        if len(values) > len(self._whole):  # what the head cannot draft is written once
            self._whole = self._whole.new_full((len(values), self._whole.shape[1]), float("-inf"))
        return self._whole[: len(values)].index_copy_(1, self._drafted, values)
