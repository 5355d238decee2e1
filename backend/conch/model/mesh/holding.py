"""What each rank of a mesh holds, found out without weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from conch.api import EngineConfig, ModelSpec
from conch.api.mesh import Seat
from conch.api.mesh_config import check_layers, check_model, shape_of
from conch.model.describe import Description
from conch.model.mesh.balance import Costs, count_layers
from conch.model.mesh.cut import Share, check_has_stages, cut_model
from conch.model.mesh.experts.cutting import ExpertShare
from conch.model.mesh.split import Heads, Range, share_of
from conch.model.mesh.traffic import Speech

_NO_TIME_S = 1.0
"""Nobody waits for a rank that is only looked at."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers, not bytes, that a rank has of each kind of parameter.

    Attributes
    ----------
    embedding
        Looked up a row a token.
    layers
        Multiplied with every token.
    experts
        Multiplied with those tokens that choose them.
    head
        Multiplied with those tokens whose logits are wanted.
    """

    embedding: int
    layers: int
    experts: int
    head: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.layers + self.experts + self.head


@dataclass(frozen=True, slots=True)
class Holding:
    """One rank's share of a model.

    Attributes
    ----------
    seat
        Which rank.
    layers, heads, experts
        Which ones of the model; experts as long as they have not moved.
    num_experts
        Of a layer of the model; 0 where it has none.
    weights
        Its parameters.
    dtype
        Of them, as torch spells it.
    weight_bytes
        What they take.
    kv_bytes
        What the KV of a token takes.
    head_sizes
        Of a query head and of its value, together.
    speech
        What it tells other ranks.
    """

    seat: Seat
    layers: Range
    heads: Heads
    experts: Range
    num_experts: int
    weights: Weights
    dtype: str
    weight_bytes: int
    kv_bytes: int
    head_sizes: int
    speech: Speech


def holdings(description: Description, config: EngineConfig) -> list[Holding]:
    """Divide a model as an engine does; returns what each rank holds, in their order.

    Stages that the configuration does not settle have layers by their weights, where an engine measures.

    Raises
    ------
    ConfigError
        It cannot be divided like this; the message is that of an engine.
    """
    shape = shape_of(config)
    check_model(description.spec, shape.tensor, shape.pipeline)
    check_layers(description.spec, config.pipeline_layers)
    counts = [description.spec.num_layers]
    if shape.pipeline > 1:
        check_has_stages(description)
        counts = list(config.pipeline_layers or count_layers(_weigh(description), shape.pipeline))
    bounds = [0, *accumulate(counts)]
    seats = [Seat(rank, shape, _NO_TIME_S) for rank in range(shape.size)]
    return [
        _holding(description, seat, (bounds[seat.stage], bounds[seat.stage + 1]), config) for seat in seats
    ]


def _weigh(description: Description) -> Costs:
    """Return what layers and head weigh, of experts only those that a token chooses."""
    share = _chosen(description) / (_num_experts(description) or 1)
    layers = []
    for layer in description.meta.base_model.layers:
        stacks = {id(weight): weight.numel() for weight in layer.parameters() if weight.dim() == 3}
        layers.append(_numel([layer]) - (1 - share) * sum(stacks.values()))
    return Costs(tuple(layers), float(_numel([description.meta.get_output_embeddings()])))


def _holding(description: Description, seat: Seat, layers: Range, config: EngineConfig) -> Holding:
    share = cut_model(description, seat, layers, config)
    first, last = share.layers
    experts = [own for own in share.experts if first <= own.layer < last]
    weights, attention = _count(share, experts, seat), description.spec.attention
    itemsize = int(getattr(torch, attention.dtype).itemsize)
    return Holding(
        seat=seat,
        layers=share.layers,
        heads=share.heads,
        experts=_experts_of(experts, seat),
        num_experts=experts[0].placement.num_experts if experts else 0,
        weights=weights,
        dtype=attention.dtype,
        weight_bytes=weights.total * itemsize,
        kv_bytes=_kv_bytes(share_of(description.spec, share.heads, share.layers)),
        head_sizes=attention.head_size + attention.value_head_size,
        speech=Speech(
            seat=seat,
            width=share.base.config.hidden_size,
            itemsize=itemsize,
            sums=_sums(share, experts, seat),
            vocabulary=description.spec.vocab_size,
            expert_layers=len(experts),
            chosen=_chosen(description),
            slots=len(experts[0].placement.slots) if experts else 0,
        ),
    )


def _experts_of(experts: list[ExpertShare], seat: Seat) -> Range:
    """Return the slots of a rank in a layer, which hold the experts of these numbers at first."""
    if not experts:
        return 0, 0
    bounds = experts[0].placement.bounds
    return bounds[seat.expert_part], bounds[seat.expert_part + 1]


def _text_config(description: Description) -> Any:  # noqa: ANN401 - transformers is not typed
    return description.hf_config.get_text_config()


def _chosen(description: Description) -> int:
    """Return how many experts a token chooses."""
    return int(getattr(_text_config(description), "num_experts_per_tok", None) or 0)


def _num_experts(description: Description) -> int:
    found = (getattr(part, "num_experts", None) for part in description.meta.base_model.layers.modules())
    return next((number for number in found if isinstance(number, int)), 0)


def _sums(share: Share, experts: list[ExpertShare], seat: Seat) -> int:
    """Count where states are added up in this stage."""
    if seat.shape.tensor == 1:
        return 0
    kept = {id(module) for module in share.module.modules()}
    linears = sum(1 for linear in share.row_parallel if id(linear) in kept)
    return linears + sum(own.is_inner_divided for own in experts) + int(seat.is_first_stage)


def _count(share: Share, experts: list[ExpertShare], seat: Seat) -> Weights:
    embedding = _numel([share.module.get_input_embeddings()]) if seat.is_first_stage else 0
    head = _numel([share.module.get_output_embeddings()]) if seat.is_last_stage else 0
    total, of_experts = _numel([share.module]), _numel(own.module for own in experts)
    if share.is_tied and seat.shape.size == 1:
        embedding = 0
    return Weights(embedding, total - embedding - of_experts - head, of_experts, head)


def _numel(modules: Iterable[torch.nn.Module]) -> int:
    """Count parameters; one that is there twice takes memory once."""
    return sum(weight.numel() for module in modules for weight in module.parameters())


def _kv_bytes(spec: ModelSpec) -> int:
    attention = spec.attention
    each = attention.num_kv_heads * (attention.head_size + attention.value_head_size)
    return spec.num_layers * each * int(getattr(torch, attention.pool_dtype).itemsize)
