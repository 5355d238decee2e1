"""A rank's model as its worker runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from conch.api import ConfigError, EngineConfig, Move, StepBatch
from conch.api.experts import ExpertLoad
from conch.model.attention import STEP_KEYWORD, PagedStep
from conch.model.describe import Description
from conch.model.logits import Logits
from conch.model.mesh.cut import Share
from conch.model.mesh.experts.stage import StageExperts, join_experts
from conch.model.mesh.group import MeshGroup
from conch.model.mesh.layers import join_layers
from conch.model.mesh.rows import AllRows, DividedRows, Rows
from conch.model.mesh.split import part_of
from conch.model.mesh.weights import fill
from conch.model.states import KeptStates

Progress = Callable[[str, float], None]


class StagedModel:
    """The layers of a stage, and what comes before and after them: tokens or states in, states or logits out.

    Parameters
    ----------
    share
        The rank's own modules, with weights.
    group
        The other ranks.
    widths
        Columns of logits of each part.
    rows
        Who computes which rows.
    experts
        Of the layers that have them.
    """

    def __init__(
        self, share: Share, group: MeshGroup, widths: Sequence[int], rows: Rows, experts: StageExperts
    ) -> None:
        self._rows, self._experts = rows, experts
        self._module, self._base = share.module, share.base
        self._group, self._seat = group, group.seat
        self._widths = widths

    def logits(self, batch: StepBatch, step: PagedStep) -> Logits:
        """Run the step and return the logits of its `logit_rows`; for rank 0."""
        values = self.compute(batch, step)
        assert values is not None, "rank 0 gathers the logits"
        return Logits.of(values.float())

    def keep_states(self, layers: Sequence[int]) -> KeptStates:
        """Refuse: a rank sees only its own layers.

        Raises
        ------
        ConfigError
            Always.
        """
        raise ConfigError("drafting from the model's states is served by one rank only")

    def follow(self, moves: Sequence[Move]) -> None:
        """Hear which blocks were moved before the next step."""
        self._rows.follow(moves)

    def warmed_up(self) -> None:
        """Forget what warming up has counted."""
        self._experts.restart()

    def expert_load(self) -> ExpertLoad:
        """Return what the experts had to do."""
        return self._experts.load()

    def close(self) -> None:
        """Let go of the checkpoint."""
        self._experts.close()

    def compute(self, batch: StepBatch, step: PagedStep) -> torch.Tensor | None:
        """Run this rank's share of the step; returns logits [L, V] at rank 0, None at all others."""
        self._experts.begin_step()
        values = self._rows.run(batch, step, self._compute_rows)
        self._experts.end_step()
        return values

    def _compute_rows(self, batch: StepBatch, step: PagedStep) -> torch.Tensor | None:
        given = {
            "position_ids": batch.positions.unsqueeze(0),
            "use_cache": False,
            "return_dict": True,
            STEP_KEYWORD: step,
            **self._input(batch),
        }
        if not self._seat.is_last_stage:
            self._group.handover.send(self._base(**given).last_hidden_state[0])
            return None
        values: torch.Tensor = self._module(logits_to_keep=batch.logit_rows, **given).logits[0]
        if not len(values):
            return values.new_empty(0, sum(self._widths))
        return self._group.gather(values, self._widths)

    def _input(self, batch: StepBatch) -> dict[str, Any]:
        if self._seat.is_first_stage:
            return {"input_ids": batch.input_ids.unsqueeze(0)}
        return {"inputs_embeds": self._group.handover.take(len(batch.input_ids)).unsqueeze(0)}


def load_share(
    share: Share, description: Description, group: MeshGroup, config: EngineConfig, progress: Progress
) -> StagedModel:
    """Load the weights of a share, and connect it to the other ranks.

    Raises
    ------
    CheckpointError
        The weights do not fit the model.
    """
    fill(share, description, progress)
    join_layers(share, group)
    experts = join_experts(share, group, description, config)
    parts = group.seat.shape.tensor
    total = description.spec.vocab_size
    ranges = [part_of(total, parts, index) for index in range(parts)]
    dtype = next(share.module.parameters()).dtype
    group.handover.expect(config.max_num_batched_tokens, share.base.config.hidden_size, dtype)
    rows: Rows = AllRows()
    if group.seat.shape.expert > 1:
        rows = DividedRows(group, experts.layers, config.block_size, total, dtype)
    return StagedModel(share, group, [last - first for first, last in ranges], rows, experts)
