"""`eagle`: a head on the target's hidden states says what the target would say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from conch.api import DraftContext, DraftHead, Row

if TYPE_CHECKING:
    from conch.api import Drafter


@dataclass(slots=True)
class _Draft:
    """A request that drafts: the slot that comes next, and how many tokens it may draft."""

    request_id: int
    slot: int
    room: int
    tokens: list[int] = field(default_factory=list)


class EagleDrafter:
    """Runs a head after each step: over what the target has computed in it, then a token at a time.

    It notes nothing from step to step: where a request was preempted or goes on from cached blocks, its slots
    are where the target's KV is. What the head has made of drafts is computed again from the target's states
    once they are accepted.

    Parameters
    ----------
    head
        The head.
    """

    def __init__(self, head: DraftHead) -> None:
        self._head = head

    def propose(self, context: DraftContext) -> list[tuple[int, ...]]:
        """Draft for each row that has room, all at once."""
        rooms = dict(zip(context.request_ids, context.room, strict=True))
        drafts: dict[int, _Draft] = {}
        rows = []
        for span in context.spans:
            samples = rooms.get(span.request_id, 0) > 0
            rows.append(_row(span.request_id, span.start, span.end - span.start, samples))
            if samples:
                drafts[span.request_id] = _Draft(span.request_id, span.end, rooms[span.request_id])
        if drafts:
            self._draft(list(drafts.values()), rows)
        elif rows:
            self._head.logits(rows)
        return [
            tuple(drafts[request_id].tokens) if request_id in drafts else ()
            for request_id in context.request_ids
        ]

    def forget(self, request_ids: Sequence[int]) -> None:
        """Have nothing to drop."""

    def _draft(self, live: list[_Draft], rows: list[Row]) -> None:
        """Draw for `live` from the rows that sample, then from a slot of each, until none has room."""
        while live:
            drawn = self._head.draw([draft.request_id for draft in live], self._head.logits(rows))
            going_on: list[_Draft] = []
            rows = []
            for draft, token_id in zip(live, drawn, strict=True):
                if token_id is None:
                    continue
                draft.tokens.append(token_id)
                if len(draft.tokens) < draft.room:
                    going_on.append(draft)
                    rows.append(_row(draft.request_id, draft.slot, 1, True))
                    draft.slot += 1
            live = going_on


def _row(request_id: int, start: int, count: int, samples: bool) -> Row:
    return Row(request_id, start, count, samples, (), 0, ())


if TYPE_CHECKING:
    _: type[Drafter] = EagleDrafter
