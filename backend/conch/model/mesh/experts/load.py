"""What the experts of a stage have to do, counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from conch.api.experts import ExpertLoad
from conch.model.mesh.experts.placement import Placement

_SCALE = 1 << 16
"""Recent load is kept in whole numbers, in units of one over this: all ranks must find the same."""


class LoadCounter:
    """Adds up tokens by expert and by part. Every rank of a stage counts those of all parts.

    Parameters
    ----------
    placements
        Of each layer that has experts.
    window
        Steps over which recent load is remembered.
    """

    def __init__(self, placements: Sequence[Placement], window: int) -> None:
        layers, num_slots = len(placements), len(placements[0].slots)
        self._window = window
        self._step = torch.zeros(layers, num_slots, dtype=torch.int64)
        self.tokens = torch.zeros(layers, placements[0].num_experts, dtype=torch.int64)
        self._recent = torch.zeros_like(self.tokens)
        bounds = placements[0].bounds
        sizes = torch.tensor(bounds).diff()
        self._part_of_slot = torch.arange(len(sizes)).repeat_interleave(sizes).expand(layers, -1)
        self._recent_parts = torch.zeros(layers, len(sizes), dtype=torch.int64)
        self._expert_of_slot = torch.tensor([placement.slots for placement in placements])

    def restart(self) -> None:
        """Forget everything: what warmed up is not load."""
        for counts in (self.tokens, self._recent, self._recent_parts):
            counts.zero_()

    def count(self, layer: int, slots: torch.Tensor) -> None:
        """Take the tokens of each slot in one step, int64 [slots]."""
        self._step[layer] = slots

    def end_step(self) -> None:
        """Add the step to the totals."""
        experts = torch.zeros_like(self.tokens).scatter_add_(1, self._expert_of_slot, self._step)
        parts = torch.zeros_like(self._recent_parts).scatter_add_(1, self._part_of_slot, self._step)
        self.tokens += experts
        self._recent += experts * _SCALE - self._recent // self._window
        self._recent_parts += parts * _SCALE - self._recent_parts // self._window
        self._step.zero_()

    def recent(self, layer: int) -> list[int]:
        """Return the recent load of each expert."""
        found: list[int] = self._recent[layer].tolist()
        return found

    def moved(self, layer: int, placement: Placement) -> None:
        """Learn that experts of a layer have moved; how its parts fared before is forgotten."""
        self._expert_of_slot[layer] = torch.tensor(placement.slots)
        self._recent_parts[layer] = 0

    @property
    def imbalance(self) -> float:
        """Recent tokens of the busiest part over the mean, averaged over the layers that had any."""
        parts = self._recent_parts.double()
        busy = parts[parts.sum(1) > 0]
        return float((busy.amax(1) / busy.mean(1)).mean()) if len(busy) else 0.0

    def report(self, layers: Sequence[int], tokens: torch.Tensor) -> ExpertLoad:
        """Put totals in words: `tokens` of all layers up to these."""
        return ExpertLoad(tuple(layers), tuple(map(tuple, tokens.tolist())), self.imbalance)
