"""A head on the target's hidden states, for drafters: its KV lies under the target's block numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from conch.api import (
    AttentionKernel,
    AttentionSpec,
    ConfigError,
    ModelSpec,
    PluginError,
    Row,
    Span,
)
from conch.api.model_reference import resolve_model_reference
from conch.model.attention import PagedStep
from conch.model.choosing import Model
from conch.model.eagle.head import build_head
from conch.model.eagle.layout import HeadLayout
from conch.model.eagle.parts import read_head
from conch.model.eagle.slots import Given, Slots
from conch.worker.batch_builder import BatchBuilder
from conch.worker.draft_draws import DraftDraws
from conch.worker.draft_pool import DraftPool
from conch.worker.late_slots import LateSlots
from conch.worker.prepare import Prepared
from conch.worker.row_table import RowTable
from conch.worker.scratch import ScratchBlocks


class StateHead(DraftPool):
    """`conch.api.DraftHead`, over the worker's own row table.

    Slot i of its KV is computed in the step in which the target computes token i: only then are there states.

    Parameters
    ----------
    target
        The model that it drafts for.
    model
        The same, loaded; is told to keep states.
    build_kernel
        Builds the head's attention.
    table, draws
        What is known of the requests, and where drafts are drawn.

    Raises
    ------
    CheckpointError
        The head cannot be read, or is for another model.
    ConfigError
        None is named.
    PluginError
        The kernel cannot serve it.
    """

    def __init__(
        self,
        target: Prepared,
        model: Model,
        build_kernel: Callable[[ModelSpec], AttentionKernel],
        table: RowTable,
        draws: DraftDraws,
    ) -> None:
        config, settings = target.config, target.config.speculative_config
        if settings is None or settings.model is None:
            raise ConfigError("this drafter needs speculative_config.model")
        folder = Path(resolve_model_reference(settings.model)).expanduser()
        layout, weights = read_head(folder, target.description)
        spec = head_spec(layout, target.spec)
        kernel = build_kernel(spec)
        reasons = kernel.unfit(spec.attention)
        if reasons:
            raise PluginError(f"attention kernel for the head: {'; '.join(reasons)}")
        scratch = ScratchBlocks(table, config.block_size, config.max_num_seqs, settings.num_tokens)
        super().__init__(spec, kernel, scratch)
        self._head = build_head(layout, weights, kernel, spec)
        self._states = model.keep_states(layout.state_layers)
        self._table, self._draws = table, draws
        device = torch.device(spec.attention.device)
        self._builder = BatchBuilder(table, config.block_size, device, ahead=1)
        self._late = LateSlots()
        self._can_be_late = target.spec.attention.reach is None  # else blocks are given up on the way
        self._offsets: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self._outputs = torch.empty(0)

    def begin(self, rows: Sequence[Row]) -> None:
        """Begin the drafting of a step: the target has just computed `rows`."""
        self._scratch.begin()
        self._slots.clear()
        self._offsets.clear()
        first = 0
        for row in rows:
            self._offsets[row.request_id] = first - row.start  # from a token to its place among the states
            first += row.count

    def keep_up(self, spans: Sequence[Span]) -> None:
        """Compute the slots of a step after which nothing is drafted, now or some steps later."""
        firsts = [self._offsets[span.request_id] + span.start for span in spans]
        self._late.put_off(spans, firsts, self._states.values)
        if self._late.are_many or not self._can_be_late:
            self.settle()

    def settle(self) -> None:
        """Compute what was put off."""
        if self._late:
            rows, states = self._late.take()
            if rows:
                self._run(rows, states)

    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Compute slots and their KV; returns the logits of those that sample: float32 [L, V]."""
        self.settle()
        slots = self._run(rows, self._given(rows))
        self._outputs = slots.outputs
        sampled = (row.request_id for row in rows if row.samples)
        self._slots = {request_id: place for place, request_id in enumerate(sampled)}
        return slots.logits

    def draw(self, request_ids: Sequence[int], logits: torch.Tensor) -> list[int | None]:
        """Draw the next draft of each request as its own settings say."""
        return self._draws.draw(request_ids, logits)

    def close(self) -> None:
        """Free the device."""
        self._pools = []
        del self._head

    def _run(self, rows: Sequence[Row], given: torch.Tensor) -> Slots:
        """Compute slots of what they are made of."""
        with self._scratch.lent(rows):
            batch, _ = self._builder.build(rows)
        step = PagedStep(self._kernel, self._kernel.plan(batch), self._pools)
        return self._head.run(batch, Given(given), step)

    def _given(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return what slots are made of: states of the target or, later in a step, outputs of the head."""
        if self._slots:
            return self._outputs[[self._slots[row.request_id] for row in rows]]
        places: list[int] = []
        for row in rows:
            first = self._offsets[row.request_id] + row.start
            places.extend(range(first, first + row.count))
        states = self._states.values
        return states if len(places) == len(states) else states[places]


def head_spec(layout: HeadLayout, target: ModelSpec) -> ModelSpec:
    """Return the head as a model of one layer, which sees no further back than the target."""
    attention: AttentionSpec = dataclasses.replace(
        target.attention,
        num_heads=layout.heads,
        num_kv_heads=layout.kv_heads,
        head_size=layout.head_size,
        value_head_size=layout.head_size,
        windows=(target.attention.reach,),
        softcap=False,
        sinks=False,
    )
    return dataclasses.replace(target, name="EAGLE head", attention=attention)
