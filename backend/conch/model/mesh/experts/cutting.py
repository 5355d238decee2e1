"""A rank's share of the experts, on the meta device."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from conch.api import ConfigError
from conch.api.mesh import Seat
from conch.model.mesh.experts.placement import Placement
from conch.model.mesh.source import narrow
from conch.model.mesh.split import part_of

_MODULE_STYLES = {"ep_dispatch_experts", "moe_tp_experts"}
_STACK_STYLE = "grouped_gemm"
_PARTS = ("has_gate", "has_bias", "is_transposed", "num_experts")


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """What a rank has of one layer's experts.

    Attributes
    ----------
    layer
        Number of the layer in the whole model.
    module
        transformers' module of all experts, with the slots of this rank, and its part of their inner width.
    placement
        Who has which expert.
    is_inner_divided
        Whether the tensor ranks have to add up what comes of it.
    """

    layer: int
    module: Any
    placement: Placement
    is_inner_divided: bool


def matching(pattern: str, names: Mapping[str, Any]) -> list[str]:
    """Return the names that a pattern of one of transformers' plans means."""
    matches = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
    return [name for name in names if matches(name)]


def narrow_inner(base: Any, name: str, style: str, seat: Seat) -> None:  # noqa: ANN401
    """Take this tensor rank's part of the inner width of a layer's experts.

    Parameters
    ----------
    name
        A stack of matrices, [N, 2 * inner, h] (gate, and below it up) or [N, h, inner].
    style
        ``packed_colwise`` for the first, ``rowwise`` for the second.

    Raises
    ------
    ConfigError
        The matrices lie in another way.
    """
    path, _, leaf = name.rpartition(".")
    experts = base.get_submodule(path)
    if not _is_known(experts) or experts.is_transposed or not (experts.is_concatenated and experts.has_gate):
        raise ConfigError(
            f"tensor_parallel_size {seat.shape.tensor} cannot divide {type(experts).__name__}: "
            "its matrices are transposed or interleaved"
        )
    shape = getattr(experts, leaf).shape
    if style == "rowwise":
        narrow(experts, leaf, 2, [part_of(shape[2], seat.shape.tensor, seat.part)])
        return
    half = shape[1] // 2
    first, last = part_of(half, seat.shape.tensor, seat.part)
    narrow(experts, leaf, 1, [(first, last), (half + first, half + last)])


def cut_experts(base: Any, seat: Seat, num_redundant: int) -> Iterator[ExpertShare]:  # noqa: ANN401
    """Take this part's experts out of every layer that has any, by the model's own plan.

    Raises
    ------
    ConfigError
        There are none, or too few.
    """
    plan: dict[str, str] = base.config.base_model_ep_plan or {}
    by_tensor: dict[str, str] = base.config.base_model_tp_plan or {}
    modules, size = dict(base.named_modules()), seat.shape.expert
    found = [
        path
        for pattern, style in {**by_tensor, **plan}.items()
        if style in _MODULE_STYLES
        for path in matching(pattern, modules)
    ]
    if not found and size > 1:
        raise ConfigError(f"expert_parallel_size {size}: {type(base).__name__} has no experts to divide")
    divided = {path for pattern, style in by_tensor.items() for path in matching(pattern, modules)}
    stacks = {
        name
        for pattern, style in plan.items()
        if style == _STACK_STYLE
        for name in matching(pattern, dict(base.named_parameters()))
    }
    for path in found:
        experts = modules[path]
        is_inner_divided = seat.shape.tensor > 1 and path in divided
        names = [name for name, _ in experts.named_parameters()]
        odd = [name for name in names if size > 1 and f"{path}.{name}" not in stacks]
        if odd or not _is_known(experts):
            if size == 1 and not is_inner_divided:
                continue  # transformers' own module runs them
            raise ConfigError(f"{type(experts).__name__}: these experts cannot be divided among ranks")
        placement = _place(experts.num_experts, seat, num_redundant)
        own = [(expert, expert + 1) for expert in placement.parts[seat.expert_part]]
        for name in names if size > 1 else ():
            narrow(experts, name, 0, own)
        yield ExpertShare(_layer_of(path), experts, placement, is_inner_divided)


def _is_known(experts: Any) -> bool:  # noqa: ANN401
    """Whether experts are stacks of two matrices each, with what transformers says of such."""
    return all(hasattr(experts, part) for part in _PARTS) and not experts.has_post_expert_norm


def _place(total: int, seat: Seat, num_redundant: int) -> Placement:
    size = seat.shape.expert
    if size > total:
        raise ConfigError(f"expert_parallel_size {size} is more than the {total} experts of a layer")
    if num_redundant > total * (size - 1):
        raise ConfigError(
            f"num_redundant_experts {num_redundant} is more than {total} experts can be held by "
            f"{size} parts, once by each"
        )
    return Placement.first(total, num_redundant, size)


def _layer_of(path: str) -> int:
    return int(next(piece for piece in path.split(".") if piece.isdigit()))
