"""Experts that move to where there is room, while the engine serves."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

import torch

from conch.api.experts import EPLBConfig
from conch.model.describe import Description
from conch.model.mesh.experts.layer import ExpertLayer
from conch.model.mesh.experts.load import LoadCounter
from conch.model.mesh.experts.placement import Placement
from conch.model.mesh.source import Source
from conch.model.mesh.stored import Stored
from conch.model.mesh.weights import as_served


class Balancing(Protocol):
    """Who moves experts."""

    def begin_step(self) -> None:
        """Move some, if it is time: called at every rank before each step."""

    def restart(self) -> None:
        """Count steps from here."""

    def close(self) -> None:
        """Let go of the checkpoint."""


class NoBalancing:
    """Experts stay where they are."""

    def begin_step(self) -> None:
        """Do nothing."""

    def restart(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class LoadBalancing:
    """Looks at the load now and then, and moves the experts of one layer before each of the next steps.

    Nobody gives orders: every rank has counted the same, so every rank finds the same placement at the same
    step. A rank reads what it gets from the checkpoint; the others wait for the slowest of them.

    Parameters
    ----------
    config
        When to look.
    layers, sources
        This rank's layers with experts, and where the parameters of each come from, by name.
    counter
        Counts what experts have to do.
    part
        Which part this rank belongs to.
    description
        The model.
    """

    def __init__(
        self,
        config: EPLBConfig,
        layers: Sequence[tuple[ExpertLayer, Mapping[str, Source]]],
        counter: LoadCounter,
        part: int,
        description: Description,
    ) -> None:
        self._interval = config.step_interval
        self._layers, self._counter, self._part = layers, counter, part
        self._description = description
        self._files = ExitStack()
        self._stored = Stored(description, self._files)
        self._steps = 0
        self._coming: deque[tuple[int, Placement]] = deque()

    def begin_step(self) -> None:
        """Move the experts of a layer, or see whether any should be moved."""
        self._steps += 1
        if self._coming:
            self._move(*self._coming.popleft())
        elif self._steps % self._interval == 0:
            for index, (layer, _) in enumerate(self._layers):
                found = layer.placement.balanced(self._counter.recent(index))
                if found is not layer.placement:
                    self._coming.append((index, found))

    def restart(self) -> None:
        """Count steps from here."""
        self._steps = 0
        self._coming.clear()

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _move(self, index: int, placement: Placement) -> None:
        layer, sources = self._layers[index]
        old, new = layer.placement.parts[self._part], placement.parts[self._part]
        changed = [(slot, expert) for slot, expert in enumerate(new) if old[slot] != expert]
        for name, weight in layer.experts.named_parameters(recurse=False):
            for slot, expert in changed:
                value = self._stored.read(sources[name].row(expert))
                with torch.inference_mode():
                    weight[slot] = as_served(value[0], sources[name].name, self._description)
        layer.placement = placement
        self._counter.moved(index, placement)
