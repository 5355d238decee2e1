"""Which rank has which experts of a layer, some of them more than once."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from conch.model.mesh.split import part_of


@dataclass(frozen=True)
class Placement:
    """The experts of one layer in the slots of all parts.

    Slots are numbered through all parts. An expert that has several is reached by all of them in turn.

    Attributes
    ----------
    parts
        For each part, the expert in each of its slots.
    num_experts
        Experts of the layer, each of which has a slot at least.
    """

    parts: tuple[tuple[int, ...], ...]
    num_experts: int

    @classmethod
    def first(cls, num_experts: int, num_redundant: int, num_parts: int) -> Placement:
        """Place experts before any load is known: in their order, and the first ones once more."""
        total = num_experts + num_redundant
        ranges = [part_of(total, num_parts, part) for part in range(num_parts)]
        return cls(
            tuple(tuple(slot % num_experts for slot in range(*slots)) for slots in ranges), num_experts
        )

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """The expert in every slot."""
        return tuple(expert for part in self.parts for expert in part)

    @cached_property
    def bounds(self) -> list[int]:
        """Where the slots of each part begin, and the end."""
        bounds = [0]
        for part in self.parts:
            bounds.append(bounds[-1] + len(part))
        return bounds

    @cached_property
    def counts(self) -> torch.Tensor:
        """How many slots each expert has: int64 [N]."""
        return torch.bincount(torch.tensor(self.slots), minlength=self.num_experts)

    @cached_property
    def table(self) -> torch.Tensor:
        """The slots of each expert, of those that have fewer again from the first: int64 [N, most]."""
        where: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.slots):
            where[expert].append(slot)
        most = max(map(len, where))
        return torch.tensor([(own * most)[:most] for own in where])

    def slots_of(self, chosen: torch.Tensor, offset: int) -> torch.Tensor:
        """Return the slot of each chosen expert, int64 [T, k]; tokens go to its slots in turn."""
        turns = torch.arange(offset, offset + len(chosen)).unsqueeze(1)
        slots: torch.Tensor = self.table[chosen, turns % self.counts[chosen]]
        return slots

    def imbalance(self, load: Sequence[int]) -> float:
        """Return what the busiest part would have to do over the mean, under a load of each expert."""
        counts = self.counts.tolist()
        parts = [sum(load[expert] / counts[expert] for expert in part) for part in self.parts]
        mean = sum(parts) / len(parts)
        return max(parts) / mean if mean else 1.0

    def balanced(self, load: Sequence[int]) -> Placement:
        """Return a placement in as many slots that suits a load of each expert better, if there is one.

        Whoever has most to do for each of its slots gets the next one; then the slots with the most to do are
        given to the part with the least, first to last. All in whole numbers and in a fixed order, so that
        every rank finds the same. Experts that stay with a part keep their slot.
        """
        room = [len(part) for part in self.parts]
        counts = _replicas(load, sum(room), len(room))
        parts: list[list[int]] = [[] for _ in room]
        done = [0] * len(room)
        shares = [load[expert] * _UNIT // counts[expert] for expert in range(self.num_experts)]
        for expert in sorted(range(self.num_experts), key=lambda each: (-shares[each], each)):
            for _ in range(counts[expert]):
                open_parts = [part for part in range(len(room)) if len(parts[part]) < room[part]]
                part = min(open_parts, key=lambda each: (done[each], expert in parts[each], each))
                parts[part].append(expert)
                done[part] += shares[expert]
        settled = (_settled(old, new) for old, new in zip(self.parts, parts, strict=True))
        found = Placement(tuple(settled), self.num_experts)
        return found if found.imbalance(load) < self.imbalance(load) * _WORTH else self


_UNIT = 1 << 20
"""Load is divided among the slots of an expert in units of this."""
_WORTH = 0.95
"""Experts move where that brings the imbalance down to this share of what it is."""


def _replicas(load: Sequence[int], num_slots: int, num_parts: int) -> list[int]:
    """Return how many slots each expert gets: one, more for the busiest, but no more than there are parts."""
    counts = [1] * len(load)
    heap = [(-each, expert) for expert, each in enumerate(load)]
    heapq.heapify(heap)
    for _ in range(num_slots - len(load)):
        _, expert = heapq.heappop(heap)
        counts[expert] += 1
        if counts[expert] < num_parts:
            heapq.heappush(heap, (-(load[expert] * _UNIT // counts[expert]), expert))
    return counts


def _settled(old: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """Return the new experts of a part in an order that leaves those that stay where they are."""
    arriving = list(new)
    settled: list[int | None] = [None] * len(old)
    for slot, expert in enumerate(old):
        if expert in arriving:
            arriving.remove(expert)
            settled[slot] = expert
    return tuple(arriving.pop(0) if expert is None else expert for expert in settled)
