"""What drafting adds to a worker: the drafter, and the models and memory that it asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from conch.api import AttentionKernel, Drafter, DraftHead, DraftModel, ModelSpec
from conch.model.choosing import Model
from conch.worker.draft_control import BackOff, DraftControl, Schedule
from conch.worker.draft_draws import DraftDraws
from conch.worker.prepare import Prepared
from conch.worker.row_table import RowTable
from conch.worker.sampler import Sampler
from conch.worker.second_model import SecondModel, prepare_draft_model
from conch.worker.speculation import Drafting, NoDrafting, Speculation
from conch.worker.state_head import StateHead

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class DraftLoaders:
    """What loads models for a drafter.

    Attributes
    ----------
    model
        Loads `speculative_config.model` beside the target.
    head
        Loads it as a head on the target's hidden states.
    """

    model: Callable[[], DraftModel]
    head: Callable[[], DraftHead]


@dataclass(frozen=True, slots=True)
class WorkerPlugins:
    """Builders of the plugins that a worker runs on.

    Attributes
    ----------
    kernel
        Builds the attention kernel for a model.
    drafter
        Builds the drafter; is given what loads models for it.
    """

    kernel: Callable[[ModelSpec], AttentionKernel]
    drafter: Callable[[DraftLoaders], Drafter]


class DraftingParts:
    """Builds what drafts, where the configuration asks for it.

    Parameters
    ----------
    prepared, model
        The target.
    plugins
        Builders.
    table, sampler
        The worker's.
    progress
        Told how far loading a draft model has come.
    """

    def __init__(
        self,
        prepared: Prepared,
        model: Model,
        plugins: WorkerPlugins,
        table: RowTable,
        sampler: Sampler,
        progress: Progress,
    ) -> None:
        self._settings = prepared.config.speculative_config
        self._prepared, self._plugins, self._progress = prepared, plugins, progress
        self._table, self._target = table, model
        self._draws = DraftDraws(table, sampler)
        self._models: list[SecondModel | StateHead] = []
        self._drafter = plugins.drafter(DraftLoaders(self._load, self._load_head)) if self._settings else None

    @property
    def block_bytes(self) -> int:
        """Bytes that each block takes besides the target's."""
        return sum(model.block_bytes for model in self._models)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch blocks."""
        return sum(model.block_bytes * model.num_scratch_blocks for model in self._models)

    def allocate(self, num_blocks: int) -> list[torch.Tensor]:
        """Allocate KV pools with the blocks of the target's, which moves of blocks take along."""
        return [pool for model in self._models for pool in model.allocate(num_blocks)]

    def start(self) -> Drafting:
        """Return what drafts, with nothing measured yet."""
        if self._settings is None or self._drafter is None:
            return NoDrafting()
        kind: Callable[..., DraftControl] = BackOff if self._settings.backoff else Schedule
        return Speculation(self._drafter, kind(self._settings), self._draws, self._table, self._models)

    def close(self) -> None:
        """Free the device."""
        for model in self._models:
            model.close()

    def _load(self) -> DraftModel:
        prepared = prepare_draft_model(self._prepared.config, self._prepared.spec, self._progress)
        kernel = self._plugins.kernel(prepared.spec)
        model = SecondModel(prepared, kernel, self._table, self._draws, self._prepared, self._progress)
        self._models.append(model)
        return model

    def _load_head(self) -> DraftHead:
        head = StateHead(self._prepared, self._target, self._plugins.kernel, self._table, self._draws)
        self._models.append(head)
        return head
