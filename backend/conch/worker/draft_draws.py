"""Drafts that are drawn from a distribution, and kept with it until they are verified."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from conch.api import Row
from conch.worker.batch_builder import LogitRows
from conch.worker.drawing import distribution, pick
from conch.worker.philox import Purpose
from conch.worker.row_table import RowTable
from conch.worker.sampler import NO_DRAWN_DRAFTS, Sampler
from conch.worker.verification import DrawnDraft


class DraftDraws:
    """Draws drafts as each request asks, and remembers what they were drawn from.

    Parameters
    ----------
    table
        What is known of the requests. Drafts are written after their tokens, so penalties see them.
    sampler
        Knows how a request draws.
    """

    def __init__(self, table: RowTable, sampler: Sampler) -> None:
        self._table = table
        self._sampler = sampler
        self._drafts: dict[int, list[DrawnDraft | None]] = {}

    def forget(self, request_ids: Iterable[int]) -> None:
        """Drop the drafts of requests: they were verified, or the requests ended. Unknown ids are ignored."""
        for request_id in request_ids:
            self._drafts.pop(request_id, None)

    def draw(self, request_ids: Sequence[int], logits: torch.Tensor) -> list[int | None]:
        """Draw the next draft of each request: see `conch.api.drafting.DraftModel.draw`."""
        table = self._table
        rows = [table.row_of(request_id) for request_id in request_ids]
        known = [self._drafts.setdefault(request_id, []) for request_id in request_ids]
        positions = [table.num_tokens[row] + len(drafts) for row, drafts in zip(rows, known, strict=True)]
        wanted = LogitRows(np.array(rows, np.int64), np.array(positions, np.int64))
        final, likeliest, broken = self._sampler.edited(logits, wanted)
        drawn = self._drawn(final, wanted)
        tokens: list[int | None] = []
        for index, token_id in enumerate(likeliest.tolist()):
            draft = drawn.get(index)
            chosen = token_id if draft is None else draft.token_id
            if index not in broken:
                known[index].append(draft)
                table.token_ids[rows[index], positions[index]] = chosen
            tokens.append(None if index in broken else chosen)
        return tokens

    def in_plan(self, rows: Sequence[Row]) -> Mapping[int, DrawnDraft]:
        """Return the drawn drafts that a plan's rows verify, by logit row."""
        if not self._drafts:
            return NO_DRAWN_DRAFTS
        found: dict[int, DrawnDraft] = {}
        first = 0
        for row in rows:
            known = self._drafts.get(row.request_id, ())
            for index, (token_id, draft) in enumerate(zip(row.drafts, known)):  # noqa: B905 - some may be left out
                if draft is not None and draft.token_id == token_id:
                    found[first + index] = draft
            first += 1 + len(row.drafts) if row.samples else 0
        return found

    def _drawn(self, logits: torch.Tensor, wanted: LogitRows) -> dict[int, DrawnDraft]:
        """Draw for the rows that draw, and return each draft with its distribution."""
        which = np.flatnonzero(self._table.is_random[wanted.rows])
        if not len(which):
            return {}
        index = torch.from_numpy(which).to(logits.device)
        settings = self._sampler.settings(wanted, which, Purpose.DRAFT, logits.device)
        shares = distribution(logits[index], settings)
        token_ids = pick(shares, settings.uniform)
        own = shares.gather(1, token_ids[:, None]).squeeze(1).tolist()
        return {
            int(at): DrawnDraft(token_id, share, shares[place])
            for place, (at, token_id, share) in enumerate(zip(which, token_ids.tolist(), own, strict=True))
        }
