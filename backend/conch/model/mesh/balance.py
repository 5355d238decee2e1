"""Stages that take about the same time, by what layers and head have been measured to cost."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any

import torch

from conch.model.attention import STEP_KEYWORD
from conch.model.describe import Description
from conch.model.mesh.cut import check_has_stages, loop_over
from conch.model.mesh.group import MeshGroup
from conch.model.mesh.split import Range

_log = logging.getLogger(__name__)

_ROWS = 8
_ROUNDS = 8
_SMALL = 1 << 20
_TYPICAL = 0.01
_LEAST_SHARE = 0.01
_NO_LAYER, _HEAD = "no layer", "head"

Probe = Callable[[torch.Tensor], object]


@dataclass(frozen=True, slots=True)
class Costs:
    """What a step costs, in seconds or any other unit.

    Attributes
    ----------
    layers
        Each of them.
    head
        Everything after them. What comes before them only copies a few rows.
    """

    layers: tuple[float, ...]
    head: float


def agree_on_layers(description: Description, counts: Sequence[int] | None, group: MeshGroup) -> Range:
    """Return the layers of this rank's stage: what rank 0 measures holds for all.

    Parameters
    ----------
    counts
        Layers of each stage where they are not to be measured.

    Raises
    ------
    ConfigError
        The model has no stages.
    """
    stage, stages = group.seat.stage, group.seat.shape.pipeline
    if stages == 1:
        return 0, description.spec.num_layers
    check_has_stages(description)
    if counts is None:
        counts = group.hear_first("layers", lambda: _measured(description, stages))
    first = sum(counts[:stage])
    return first, first + counts[stage]


def _measured(description: Description, stages: int) -> list[int]:
    costs = measure_costs(description)
    counts = count_layers(costs, stages)
    _log.info(
        "stages of %s layers: those take %.3g to %.3g ms, the head %.3g ms",
        counts,
        1000 * min(costs.layers),
        1000 * max(costs.layers),
        1000 * costs.head,
    )
    return counts


def count_layers(costs: Costs, stages: int) -> list[int]:
    """Return the layers of each stage, one at least, such that the slowest is as fast as can be.

    The same costs always give the same stages.
    """
    num_layers = len(costs.layers)
    before = [0.0, *accumulate(costs.layers)]
    best = [(seconds, [end]) for end, seconds in enumerate(before)]
    for stage in range(1, stages):
        tail = costs.head if stage == stages - 1 else 0.0
        best = [
            min(
                (max(best[start][0], before[end] - before[start] + tail), [*best[start][1], end - start])
                for start in range(stage, end)
            )
            if end > stage
            else (inf, [])
            for end in range(num_layers + 1)
        ]
    return best[num_layers][1]


def measure_costs(description: Description) -> Costs:
    """Time each kind of layer and the head over a few rows, with weights that mean nothing.

    Attention is left out: what it takes depends on the lengths of requests, and it is the same for all layers
    of a kind.
    """
    layers = list(description.meta.base_model.layers)
    kinds = [_kind_of(layer) for layer in layers]
    first_of = dict(zip(reversed(kinds), reversed(layers), strict=True))
    with torch.inference_mode():
        probes = {kind: _only(description, [layer]) for kind, layer in first_of.items()}
        probes[_NO_LAYER], probes[_HEAD] = _only(description, []), _head_of(description)
        seconds = _least_seconds(probes, _states(description))
    each = {kind: max(taken - seconds[_NO_LAYER], _LEAST_SHARE * taken) for kind, taken in seconds.items()}
    return Costs(tuple(each[kind] for kind in kinds), seconds[_HEAD])


def _least_seconds(probes: Mapping[object, Probe], states: torch.Tensor) -> dict[object, float]:
    """Time probes in turn, so that whatever else the machine does disturbs all of them alike.

    Where this thread does all of the work its own time is taken, which others do not disturb at all.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = dict.fromkeys(probes, inf)
    for _ in range(_ROUNDS):
        for kind, run in probes.items():
            began_s = clock()
            run(states)
            seconds[kind] = min(seconds[kind], clock() - began_s)
    return seconds


def _kind_of(layer: torch.nn.Module) -> object:
    return (type(layer), *((name, tuple(weight.shape)) for name, weight in layer.named_parameters()))


def _head_of(description: Description) -> Probe:
    """Return what norms, makes logits, and finds the likeliest token."""
    head = _filled(description.meta.get_output_embeddings())
    norm = _filled(description.meta.base_model.norm)
    return lambda states: head(norm(states)).float().argmax(-1)


def _only(description: Description, layers: Sequence[torch.nn.Module]) -> Probe:
    """Return the model's own loop over some layers, between the embedding and the norm."""
    probe = _filled(loop_over(description, layers))
    given = {
        "position_ids": torch.arange(_ROWS).unsqueeze(0),
        "use_cache": False,
        STEP_KEYWORD: _NoAttention(),
    }
    return lambda states: probe(inputs_embeds=states, **given)


def _filled(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy with memory. Small matrices are random: a router of experts is to spread its tokens."""
    copied = copy.deepcopy(module).to_empty(device="cpu")
    for weight in copied.parameters():
        _ = weight.normal_() if weight.numel() < _SMALL else weight.fill_(_TYPICAL)
    for buffer in copied.buffers():
        buffer.zero_()
    return copied


def _states(description: Description) -> torch.Tensor:
    width = description.meta.base_model.config.hidden_size
    dtype = getattr(torch, description.spec.attention.dtype)
    return torch.randn(1, _ROWS, width, generator=torch.Generator().manual_seed(0)).to(dtype)


class _NoAttention:
    """A step whose attention takes no time."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        constants: Mapping[str, Any],
    ) -> torch.Tensor:
        """Return nothing of anyone."""
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
