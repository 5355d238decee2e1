"""`draft_model`: a smaller model of the same vocabulary says what it would say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from conch.api import DraftContext, DraftModel, Row, Span

if TYPE_CHECKING:
    from conch.api import Drafter


@dataclass(slots=True)
class _Draft:
    """A request that drafts: how many tokens it has, and how many it may draft."""

    request_id: int
    num_tokens: int
    room: int
    tokens: list[int] = field(default_factory=list)

    @property
    def last_position(self) -> int:
        """Position of the last token drafted."""
        return self.num_tokens + len(self.tokens) - 1


class ModelDrafter:
    """Runs a draft model after each step: over the tokens that are new to it, then a token at a time.

    What is new to it is what the target has just computed, and the token that was sampled. Where drafting has
    paused it is more; then it is caught up with in chunks. Of a token's KV only what the target had too is
    kept: drafts are computed again once they are accepted, in the same pass as the token after them.

    Parameters
    ----------
    model
        The draft model.
    """

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._computed: dict[int, int] = {}

    def propose(self, context: DraftContext) -> list[tuple[int, ...]]:
        """Draft for each row that has room, all at once."""
        drafting = {
            request_id: _Draft(request_id, len(tokens), self._room(len(tokens), room))
            for request_id, tokens, room in zip(
                context.request_ids, context.token_ids, context.room, strict=True
            )
        }
        rows = self._catch_up(context.spans, drafting)
        live = [drafting[row.request_id] for row in rows if row.samples]
        while live:
            live = self._extend(live, rows)
            rows = [
                _row(draft.request_id, draft.num_tokens + len(draft.tokens) - 1, 1, True) for draft in live
            ]
        return [tuple(drafting[request_id].tokens) for request_id in context.request_ids]

    def forget(self, request_ids: Sequence[int]) -> None:
        """Drop what was noted of requests."""
        for request_id in request_ids:
            self._computed.pop(request_id, None)

    def _extend(self, live: Sequence[_Draft], rows: Sequence[Row]) -> list[_Draft]:
        """Compute rows and draw a token for each that samples; returns who may draft another."""
        drawn = self._model.draw([draft.request_id for draft in live], self._model.logits(rows))
        going_on = []
        for draft, token_id in zip(live, drawn, strict=True):
            if token_id is not None:
                draft.tokens.append(token_id)
                if len(draft.tokens) < draft.room:
                    going_on.append(draft)
        return going_on

    def _catch_up(self, spans: Sequence[Span], drafting: dict[int, _Draft]) -> list[Row]:
        """Return rows for what is new, as much as fits into a call; those that reach the end sample.

        Where none does, they are computed at once: nothing else will.
        """
        left = self._model.max_num_tokens
        rows = []
        for span in spans:
            draft = drafting.get(span.request_id)
            samples = draft is not None and draft.room > 0
            end = min(span.end, self._model.max_model_len)
            start = self._start(span)
            count = max(0, min(end - start, left - samples))
            self._computed[span.request_id] = start + count
            samples = samples and start + count == span.end and left > count
            if count + samples:
                rows.append(_row(span.request_id, start, count + samples, samples))
            left -= count + samples
        if rows and not any(row.samples for row in rows):
            self._model.logits(rows)
        return rows

    def _start(self, span: Span) -> int:
        computed = self._computed.get(span.request_id, span.began)
        if computed >= span.start:
            return span.start
        return max(computed, self._model.first_held(span.start))

    def _room(self, num_tokens: int, room: int) -> int:
        """Drafts before the end of the draft model's own context."""
        return max(0, min(room, self._model.max_model_len - num_tokens + 1))


def _row(request_id: int, start: int, count: int, samples: bool) -> Row:
    return Row(request_id, start, count, samples, (), 0, ())


if TYPE_CHECKING:
    _: type[Drafter] = ModelDrafter
