"""The experts of one layer, as a rank runs them.

A step's rows are divided among the parts of a stage, so each part has tokens of its own, and all of them may
choose any expert. In each layer with experts

1. every part tells all others how many of its tokens go to each slot (int64 [slots]);
2. tokens are sent to the parts that have their experts, sorted by slot (all-to-all);
3. each slot computes all that came for it at once;
4. what came of it goes back the same way, is weighted and added up;
5. tensor ranks, each of which has a share of the inner width of every expert, add up theirs (all-reduce).

So with k experts for a token, h numbers of b bytes, E parts and T tensor ranks in each, a token costs in each
layer with experts ``2 * k * h * b * T * (E - 1) / E`` bytes of all-to-all, over all ranks of the stage and
with all parts equally busy (`MeshGroup.bytes_exchanged`). The tensor ranks of its own part reduce ``h * b``
bytes each for it (`MeshGroup.bytes_reduced`), as they do for its attention. Each rank sends ``8 * slots``
bytes of counts in a step and layer, whatever the tokens (`MeshGroup.bytes_counted`). Logits of rows of other
parts than the first go there, ``V * b`` bytes each (`MeshGroup.bytes_gathered`), and KV blocks where a row
changes parts, or shares a beginning with a row of another one (`MeshGroup.bytes_moved`).
"""

from __future__ import annotations

from itertools import pairwise

import torch

from conch.model.mesh.experts.cutting import ExpertShare
from conch.model.mesh.experts.grouped import GroupedExperts
from conch.model.mesh.experts.load import LoadCounter
from conch.model.mesh.group import MeshGroup


class ExpertLayer(torch.nn.Module):
    """Takes the place of transformers' module of all experts of a layer.

    Parameters
    ----------
    share
        That module, with the parameters of this rank's slots, and who has which expert.
    index
        Which of the stage's layers with experts.
    group
        The ranks.
    counter
        Counts what experts have to do.

    Attributes
    ----------
    placement
        Changed between steps only, by whoever moves the weights.
    """

    def __init__(self, share: ExpertShare, index: int, group: MeshGroup, counter: LoadCounter) -> None:
        super().__init__()
        experts = share.module
        self.experts, self.placement = experts, share.placement
        self._add_up = group.sum if share.is_inner_divided else _as_it_is
        self._index, self._group, self._counter = index, group, counter
        self._own = GroupedExperts(experts)
        self._hidden_size = _hidden_size(experts)
        self._dtype = next(experts.parameters()).dtype

    def forward(self, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return what the chosen experts make of each token, weighted and added up.

        Parameters
        ----------
        states : [T, h]
        chosen : int64 [T, k]
        weights : [T, k]
        """
        each = chosen.shape[1]
        slots = self.placement.slots_of(chosen, self._group.seat.expert_part).flatten()
        order = slots.argsort(stable=True)
        counts = torch.bincount(slots, minlength=len(self.placement.slots))
        brought = self._compute(states[order // each], counts)
        results = torch.empty_like(brought)
        results[order] = brought
        mixed = results.view(len(states), each, -1) * weights.unsqueeze(-1)
        return self._add_up(mixed.sum(dim=1).to(states.dtype))

    def serve(self) -> None:
        """Compute what other parts send in a step in which this one has no tokens."""
        counts = torch.zeros(len(self.placement.slots), dtype=torch.int64)
        self._compute(torch.empty(0, self._hidden_size, dtype=self._dtype), counts)

    def _compute(self, states: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Have tokens [n, h] computed, which are sorted by slot; returns [n, h]."""
        everyone = self._group.share_counts(counts)
        self._counter.count(self._index, everyone.sum(dim=0))
        if len(everyone) == 1:
            return self._own.compute(states, counts.tolist())
        part, bounds = self._group.seat.expert_part, self.placement.bounds
        theirs = everyone[:, bounds[part] : bounds[part + 1]]
        sums = [0, *counts.cumsum(0).tolist()]
        sent = [sums[last] - sums[first] for first, last in pairwise(bounds)]
        received = theirs.sum(dim=1).tolist()
        came = self._group.exchange(states, sent, received)
        slots = torch.arange(theirs.shape[1]).repeat(len(theirs)).repeat_interleave(theirs.flatten())
        order = slots.argsort(stable=True)
        back = torch.empty_like(came)
        back[order] = self._own.compute(came[order], theirs.sum(dim=0).tolist())
        return self._group.exchange(back, received, sent)


def _as_it_is(states: torch.Tensor) -> torch.Tensor:
    return states


def _hidden_size(experts: torch.nn.Module) -> int:
    down: torch.Tensor = experts.down_proj  # type: ignore[assignment]
    return down.shape[2 if experts.is_transposed else 1]
