"""Drafting after a step: what the worker asks the drafter, and remembers until the drafts are verified."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from conch.api import DraftContext, Drafter, Row, RowResult, Span, StepPlan, StepResult
from conch.worker.draft_control import DraftControl
from conch.worker.draft_draws import DraftDraws
from conch.worker.row_table import RowTable, TokenViews
from conch.worker.sampler import NO_DRAWN_DRAFTS
from conch.worker.verification import DrawnDraft


class Drafting(Protocol):
    """What a worker does about drafts."""

    def begin(self, plan: StepPlan) -> None:
        """Hear of a plan before anything of it is carried out."""

    def drawn(self, rows: Sequence[Row]) -> Mapping[int, DrawnDraft]:
        """Return the drawn drafts among those that a plan's rows verify, by logit row."""

    def propose(self, rows: Sequence[Row], results: Sequence[RowResult], step_s: float) -> StepResult:
        """Add drafts for the next step to the results of one that took `step_s`."""

    def forget(self, request_ids: Sequence[int]) -> None:
        """Drop what is kept for requests that ended."""


class SecondKv(Protocol):
    """A model beside the target, with KV of its own."""

    def begin(self, rows: Sequence[Row]) -> None:
        """Begin the drafting of a step: the target has just computed `rows`."""

    def keep_up(self, spans: Sequence[Span]) -> None:
        """Take in what a step has computed after which nothing is drafted; some of it may be put off."""

    def settle(self) -> None:
        """Finish what was put off: blocks are about to change hands."""


class NoDrafting:
    """Nobody drafts."""

    def begin(self, plan: StepPlan) -> None:
        """Have no use for it."""

    def drawn(self, rows: Sequence[Row]) -> Mapping[int, DrawnDraft]:
        """Return none."""
        return NO_DRAWN_DRAFTS

    def propose(self, rows: Sequence[Row], results: Sequence[RowResult], step_s: float) -> StepResult:
        """Add none."""
        return StepResult(tuple(results))

    def forget(self, request_ids: Sequence[int]) -> None:
        """Have nothing to drop."""


class Speculation:
    """Asks a drafter after each step, as much as control allows.

    Parameters
    ----------
    drafter
        The plugin in force.
    control
        How much is drafted.
    draws
        Where drafts are drawn.
    table
        What is known of the requests.
    models
        What it may draft with.
    """

    def __init__(
        self,
        drafter: Drafter,
        control: DraftControl,
        draws: DraftDraws,
        table: RowTable,
        models: Sequence[SecondKv],
    ) -> None:
        self._drafter, self._control = drafter, control
        self._draws, self._table, self._models = draws, table, models
        self._began: dict[int, int] = {}

    def begin(self, plan: StepPlan) -> None:
        """Let models finish what they have put off, where blocks are about to change hands."""
        if plan.admitted or plan.preempted or plan.finished or plan.moves:
            for model in self._models:
                model.settle()

    def drawn(self, rows: Sequence[Row]) -> Mapping[int, DrawnDraft]:
        """Return the drawn drafts among those that a plan's rows verify, by logit row."""
        return self._draws.in_plan(rows)

    def propose(self, rows: Sequence[Row], results: Sequence[RowResult], step_s: float) -> StepResult:
        """Add drafts for the next step to the results of one that took `step_s`."""
        started_s = time.perf_counter()
        is_decode = self._learn(rows, results, step_s)
        sampled = [index for index, result in enumerate(results) if result.token_ids]
        ids = [results[index].request_id for index in sampled]
        self._draws.forget(ids)
        rooms = self._control.rooms(ids, [self._room(request_id) for request_id in ids])
        for model in self._models:
            model.begin(rows)
        if not any(rooms) and ids:
            for model in self._models:
                model.keep_up(self._spans(rows, results))
            if is_decode:
                self._control.learn_drafting(0, 0, time.perf_counter() - started_s)
            return StepResult(tuple(results))
        where = [self._table.row_of(request_id) for request_id in ids]
        context = DraftContext(ids, TokenViews(self._table, where), rooms, self._spans(rows, results))
        proposed = self._drafter.propose(context)
        drafting_s = time.perf_counter() - started_s
        if is_decode:  # a prompt says nothing about the time that a draft takes
            self._control.learn_drafting(sum(map(bool, rooms)), max(rooms), drafting_s)
        kept = self._control.trim(ids, [len(drafts) for drafts in proposed])
        news = list(results)
        for index, drafts, count in zip(sampled, proposed, kept, strict=True):
            if count:
                one = results[index]
                news[index] = RowResult(one.request_id, one.token_ids, tuple(drafts[:count]), one.logprobs)
        return StepResult(tuple(news), drafting_s)

    def forget(self, request_ids: Sequence[int]) -> None:
        """Drop what is kept for requests that ended."""
        self._drafter.forget(request_ids)
        self._control.forget(request_ids)
        self._draws.forget(request_ids)
        for request_id in request_ids:
            self._began.pop(request_id, None)

    def _learn(self, rows: Sequence[Row], results: Sequence[RowResult], step_s: float) -> bool:
        """Note what became of the drafts, and how long the step took; returns whether it was all decodes."""
        num_tokens, is_decode = 0, True
        for row, result in zip(rows, results, strict=True):
            self._began.setdefault(row.request_id, row.start)
            drafted = len(row.drafts)
            if drafted and result.token_ids:
                self._control.learn_row(row.request_id, drafted, len(result.token_ids) - 1)
            num_tokens += row.count
            is_decode = is_decode and bool(result.token_ids) and row.count == 1 + drafted
        if is_decode:
            self._control.learn_step(num_tokens, step_s)
        return is_decode

    def _room(self, request_id: int) -> int:
        """Drafts that could be of use to a request: all but the last token before its limit."""
        table = self._table
        row = table.row_of(request_id)
        room = max(0, table.limits[row] - table.num_tokens[row] - 1)
        wanted = table.params[row].num_speculative_tokens
        return room if wanted is None else min(room, wanted)

    def _spans(self, rows: Sequence[Row], results: Sequence[RowResult]) -> list[Span]:
        """Return what the step has computed, for rows that may draft sooner or later."""
        spans = []
        for row, result in zip(rows, results, strict=True):
            at = self._table.row_of(row.request_id)
            if result.failure is not None or self._table.params[at].num_speculative_tokens == 0:
                continue
            rejected = 1 + len(row.drafts) - len(result.token_ids) if row.samples else 0
            end = row.start + row.count - rejected
            spans.append(Span(row.request_id, row.start, end, self._began[row.request_id]))
        return spans
