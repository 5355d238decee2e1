"""Layers of which each rank has a part."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from conch.model.mesh.cut import Share
from conch.model.mesh.group import MeshGroup


class RowParallelLinear(torch.nn.Module):
    """Multiplies the columns that a rank has; all ranks add up what comes of it.

    Parameters
    ----------
    linear
        With the rank's columns, and the whole bias.
    group
        The ranks.
    """

    def __init__(self, linear: Any, group: MeshGroup) -> None:  # noqa: ANN401 - any linear layer
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._group = group

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Multiply, add up, add the bias."""
        product = self._group.sum(functional.linear(states, self.weight))
        return product if self.bias is None else product.add_(self.bias)


class VocabularyParallelEmbedding(torch.nn.Module):
    """Looks up the tokens whose rows a rank has; all ranks add up what they found.

    Parameters
    ----------
    embedding
        With the rank's rows, and whatever the model's class does to them.
    first
        The token of its first row.
    group
        The ranks.
    """

    def __init__(self, embedding: Any, first: int, group: MeshGroup) -> None:  # noqa: ANN401
        super().__init__()
        self._embedding, self._first, self._group = embedding, first, group
        self._count = embedding.num_embeddings

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Look up."""
        rows = token_ids - self._first
        is_elsewhere = (rows < 0) | (rows >= self._count)
        found = self._embedding(rows.masked_fill(is_elsewhere, 0))
        return self._group.sum(found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0))


def join_layers(share: Share, group: MeshGroup) -> None:
    """Put collectives into a share that has its weights, behind the embedding and each row-parallel layer."""
    if group.seat.shape.tensor == 1:
        return
    embedding = share.module.get_input_embeddings() if group.seat.is_first_stage else None
    if embedding is not None:
        share.module.set_input_embeddings(VocabularyParallelEmbedding(embedding, share.vocabulary[0], group))
    row_parallel = {id(linear) for linear in share.row_parallel}
    for owner in list(share.module.modules()):
        for name, part in owner.named_children():
            if id(part) in row_parallel:
                setattr(owner, name, RowParallelLinear(part, group))
