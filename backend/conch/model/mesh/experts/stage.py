"""All layers with experts of a rank, as its model runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from conch.api import EngineConfig
from conch.api.experts import NO_EXPERTS, EPLBConfig, ExpertLoad
from conch.model.describe import Description
from conch.model.mesh.cut import Share
from conch.model.mesh.experts.balancing import Balancing, LoadBalancing, NoBalancing
from conch.model.mesh.experts.layer import ExpertLayer
from conch.model.mesh.experts.load import LoadCounter
from conch.model.mesh.group import MeshGroup

_WINDOW = EPLBConfig().window_size


class StageExperts(Protocol):
    """The experts that a rank's model has."""

    @property
    def layers(self) -> Sequence[ExpertLayer]:
        """The layers that have any."""

    def begin_step(self) -> None:
        """Let experts move, where it is time."""

    def end_step(self) -> None:
        """Count the step."""

    def restart(self) -> None:
        """Forget what warming up has counted; called at all ranks after the same step."""

    def load(self) -> ExpertLoad:
        """Return what experts had to do; at rank 0 those of all stages."""

    def close(self) -> None:
        """Let go of the checkpoint."""


class NoStageExperts:
    """A model without experts."""

    layers: Sequence[ExpertLayer] = ()

    def begin_step(self) -> None:
        """Do nothing."""

    def end_step(self) -> None:
        """Do nothing."""

    def restart(self) -> None:
        """Do nothing."""

    def load(self) -> ExpertLoad:
        """Return nothing."""
        return NO_EXPERTS

    def close(self) -> None:
        """Do nothing."""


class CountedExperts:
    """Experts of a stage: counted, told to the next stage, and moved where that is asked for.

    Parameters
    ----------
    layers
        Of this rank.
    numbers
        Of all layers with experts up to the end of this stage, in the model.
    counter
        Counts what they have to do.
    balancing
        Moves them.
    group
        The ranks.
    """

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        numbers: Sequence[int],
        counter: LoadCounter,
        balancing: Balancing,
        group: MeshGroup,
    ) -> None:
        self.layers = layers
        self._numbers, self._counter, self._balancing, self._group = numbers, counter, balancing, group
        seat, before = group.seat, len(numbers) - len(layers)
        tells = seat.shape.pipeline > 1 and not seat.part and not seat.expert_part
        self._hears_of = counter.tokens.new_zeros(before, counter.tokens.shape[1])
        self._is_told = tells and before > 0
        self._tells = tells and not seat.is_last_stage

    def begin_step(self) -> None:
        """Let experts move, where it is time."""
        self._balancing.begin_step()

    def end_step(self) -> None:
        """Count the step, and tell the next stage."""
        self._counter.end_step()
        if self._is_told:
            self._group.hear(self._hears_of)
        if self._tells:
            self._group.tell(self._tokens)

    def restart(self) -> None:
        """Forget what warming up has counted; called at all ranks after the same step."""
        self._counter.restart()
        self._balancing.restart()
        self._hears_of.zero_()

    def load(self) -> ExpertLoad:
        """Return what experts had to do; at rank 0 those of all stages."""
        return self._counter.report(self._numbers, self._tokens)

    def close(self) -> None:
        """Let go of the checkpoint."""
        self._balancing.close()

    @property
    def _tokens(self) -> torch.Tensor:
        return torch.cat([self._hears_of, self._counter.tokens])


def join_experts(
    share: Share, group: MeshGroup, description: Description, config: EngineConfig
) -> StageExperts:
    """Put our layers in the place of transformers' experts, in a share that has its weights."""
    first, last = share.layers
    numbers = [own.layer for own in share.experts if own.layer < last]
    shares = [own for own in share.experts if first <= own.layer < last]
    if not shares:
        return NoStageExperts()
    eplb = config.eplb_config
    counter = LoadCounter([own.placement for own in shares], eplb.window_size if eplb else _WINDOW)
    paths = {id(module): path for path, module in share.module.named_modules()}
    layers, sources = [], []
    for index, own in enumerate(shares):
        layer = ExpertLayer(own, index, group, counter)
        path, _, leaf = paths[id(own.module)].rpartition(".")
        setattr(share.module.get_submodule(path), leaf, layer)
        layers.append(layer)
        names = [name for name, _ in own.module.named_parameters(recurse=False)]
        sources.append({name: share.sources[f"{path}.{leaf}.{name}"] for name in names})
    balancing: Balancing = NoBalancing()
    if eplb is not None:
        pairs = list(zip(layers, sources, strict=True))
        balancing = LoadBalancing(eplb, pairs, counter, group.seat.expert_part, description)
    return CountedExperts(layers, numbers, counter, balancing, group)
