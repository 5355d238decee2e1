"""Experts over tokens that are sorted by expert: one product for each expert that has any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class GroupedExperts:
    """The experts that a rank has of one layer, on a CPU.

    Parameters
    ----------
    experts
        transformers' module, whose parameters are stacks of matrices, one for each slot.
    """

    def __init__(self, experts: Any) -> None:  # noqa: ANN401 - transformers is not typed
        self._experts = experts
        self._first = "gate_up" if experts.has_gate else "up"

    def compute(self, states: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Run each slot over the next of its ``counts`` of `states` [n, h]; returns [n, h]."""
        experts = self._experts
        inner = self._multiply(self._first, states, counts)
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        return self._multiply("down", inner, counts)

    def _multiply(self, kind: str, states: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        experts = self._experts
        weights = getattr(experts, f"{kind}_proj")
        if not experts.is_transposed:
            weights = weights.transpose(1, 2)
        biases = getattr(experts, f"{kind}_proj_bias") if experts.has_bias else None
        product = states.new_empty(len(states), weights.shape[2])
        first = 0
        for slot, count in enumerate(counts):
            if not count:
                continue
            rows = slice(first, first + count)
            if biases is None:
                torch.mm(states[rows], weights[slot], out=product[rows])
            else:
                torch.addmm(biases[slot], states[rows], weights[slot], out=product[rows])
            first += count
        return product
