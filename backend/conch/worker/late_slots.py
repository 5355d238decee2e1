"""Slots that a head computes later: those of many steps at once take less time than a few in each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from conch.api import Row, Span

_MOST_STEPS = 8


class LateSlots:
    """Spans of steps after which nothing was drafted, and the target's states at their tokens.

    They have to be taken before a block changes hands, and before anything is drafted.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._states: list[torch.Tensor] = []
        self._places: dict[int, list[int]] = {}
        self._starts: dict[int, int] = {}
        self._num_tokens = 0

    def __bool__(self) -> bool:
        return bool(self._states)

    @property
    def are_many(self) -> bool:
        """Whether to put off no more."""
        return len(self._states) >= _MOST_STEPS

    def put_off(self, spans: Sequence[Span], firsts: Sequence[int], states: torch.Tensor) -> None:
        """Keep a step's spans, each of which begins at one of `firsts` in the step's states [T, A, h]."""
        for span, first in zip(spans, firsts, strict=True):
            begin = self._num_tokens + first
            self._starts.setdefault(span.request_id, span.start)
            places = self._places.setdefault(span.request_id, [])
            places.extend(range(begin, begin + span.end - span.start))
        self._states.append(states)
        self._num_tokens += len(states)

    def take(self) -> tuple[list[Row], torch.Tensor]:
        """Return a row for each request, and the states at their tokens one row after the other."""
        rows = [
            Row(request_id, self._starts[request_id], len(places), False, (), 0, ())
            for request_id, places in self._places.items()
        ]
        order = [place for places in self._places.values() for place in places]
        states = torch.cat(self._states)[order]
        self._clear()
        return rows, states
