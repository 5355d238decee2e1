"""How many drafts are worth it: by batch size, and by what they have brought so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from conch.api.speculative import SpeculativeConfig
from conch.worker.acceptance import Acceptance
from conch.worker.drafting_times import DraftingTimes
from conch.worker.probing import Probing
from conch.worker.step_times import StepTimes

_PROBE_SHARE = 8
_PROBE_DRAFTS = 2
_PROBED_TRIM = 64
_REST_EVERY = 32
_CLOSE = 1.3
"""Where less than this is expected to be gained, the steps without drafts are measured again now and then."""
_LARGER = 1.5
"""A step may be this many times as large as the largest measured: none is tried that may cost a lot."""
_MUST_GAIN = 1.03
"""Tokens per second with drafts over those without, before any are made: estimates are not that good."""


class DraftControl(Protocol):
    """Decides how many tokens are drafted for each request, and how many of these are verified."""

    def rooms(self, request_ids: Sequence[int], rooms: Sequence[int]) -> list[int]:
        """Return how many tokens to draft for each request, at most `rooms`."""

    def trim(self, request_ids: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Return how many of `lengths` drafted tokens to verify for each request."""

    def learn_step(self, num_tokens: int, seconds: float) -> None:
        """Take in how long a step of decodes took."""

    def learn_drafting(self, num_requests: int, rounds: int, seconds: float) -> None:
        """Take in how long it took to draft up to `rounds` tokens for each of some requests, maybe none."""

    def learn_row(self, request_id: int, drafted: int, accepted: int) -> None:
        """Take in what became of a draft."""

    def forget(self, request_ids: Iterable[int]) -> None:
        """Drop what is known of requests."""


class Schedule:
    """As many as the configuration says for the size of the batch."""

    def __init__(self, settings: SpeculativeConfig) -> None:
        self._settings = settings

    def rooms(self, request_ids: Sequence[int], rooms: Sequence[int]) -> list[int]:
        """Cut to the number for this batch size."""
        most = self._settings.most_at(len(request_ids))
        return [min(room, most) for room in rooms]

    def trim(self, request_ids: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Keep all."""
        return list(lengths)

    def learn_step(self, num_tokens: int, seconds: float) -> None:
        """Have no use for it."""

    def learn_drafting(self, num_requests: int, rounds: int, seconds: float) -> None:
        """Have no use for it."""

    def learn_row(self, request_id: int, drafted: int, accepted: int) -> None:
        """Have no use for it."""

    def forget(self, request_ids: Iterable[int]) -> None:
        """Have nothing to drop."""


class BackOff:
    """As many as make the most tokens per second, as far as measurements tell.

    A step over r requests with drafts brings ``r + sum of chances`` tokens, a chance being that a draft and
    all before it are accepted, and takes ``time(r + drafts)`` and the drafting. Drafts are taken in order of
    their chances for as long as that pays. While nothing pays a few requests still draft a little, now and
    then (`Probing`); where little is gained, a step now and then goes without drafts, so that what it is
    compared with is known.

    Parameters
    ----------
    settings
        Bounds every number.
    """

    def __init__(self, settings: SpeculativeConfig) -> None:
        self._schedule = Schedule(settings)
        self._acceptance = Acceptance(settings.num_tokens)
        self._steps, self._drafting = StepTimes(), DraftingTimes()
        self._probing = Probing()
        self._trims = self._awake = self._unrested = 0

    def rooms(self, request_ids: Sequence[int], rooms: Sequence[int]) -> list[int]:
        """Return how many tokens to draft: for all that do, as many rounds as pay for the best."""
        rooms = self._schedule.rooms(request_ids, rooms)
        if not any(rooms):
            return rooms
        round_s = self._drafting.round_s(sum(room > 0 for room in rooms))
        kept, gain = self._best(request_ids, rooms, round_s)
        rounds = max(kept)
        if not rounds:
            self._awake = 0
            due = self._probing.is_due()
            return self._probe(request_ids, rooms) if due else [0] * len(rooms)
        if not self._awake:
            self._probing.rest()
        self._awake += 1
        self._unrested += 1
        if self._unrested >= _REST_EVERY and gain < _CLOSE:
            self._unrested = 0
            return [0] * len(rooms)
        return [min(room, rounds) for room in rooms]

    def trim(self, request_ids: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Keep what pays; the drafting is paid for already. A probe is kept, and one is made at times."""
        if self._probing.is_idle or not any(lengths):
            return list(lengths)
        kept, _ = self._best(request_ids, lengths, 0.0)
        self._trims += 1
        if self._trims % _PROBED_TRIM == 0:
            left = [length if count == 0 else 0 for length, count in zip(lengths, kept, strict=True)]
            kept = [max(pair) for pair in zip(kept, self._probe(request_ids, left), strict=True)]
        return kept

    def learn_step(self, num_tokens: int, seconds: float) -> None:
        """Take in how long a step of decodes took."""
        self._steps.learn(num_tokens, seconds)
        self._probing.work(seconds)

    def learn_drafting(self, num_requests: int, rounds: int, seconds: float) -> None:
        """Take in how long it took to draft up to `rounds` tokens for each of some requests, maybe none.

        What a probe takes, or the first step of many, is the most that it can be: a draft model may have to
        catch up first.
        """
        if self._probing.is_under_way:
            self._probing.spend(seconds)
            if rounds and seconds < rounds * self._drafting.round_s(num_requests):
                self._drafting.learn(num_requests, rounds, seconds)
        elif not rounds:
            self._drafting.learn_standing(seconds)
        elif self._awake > 1:
            self._drafting.learn(num_requests, rounds, seconds)

    def learn_row(self, request_id: int, drafted: int, accepted: int) -> None:
        """Take in what became of a draft."""
        self._acceptance.learn(request_id, drafted, accepted)

    def forget(self, request_ids: Iterable[int]) -> None:
        """Drop what is known of requests."""
        self._acceptance.forget(request_ids)

    def _probe(self, request_ids: Sequence[int], rooms: Sequence[int]) -> list[int]:
        """Let one request in `_PROBE_SHARE` draft, those of which the least is known."""
        order = sorted(
            (index for index, room in enumerate(rooms) if room),
            key=lambda index: self._acceptance.tries(request_ids[index]),
        )
        chosen = set(order[: -(-len(order) // _PROBE_SHARE)])
        return [min(room, _PROBE_DRAFTS) if index in chosen else 0 for index, room in enumerate(rooms)]

    def _best(
        self, request_ids: Sequence[int], most: Sequence[int], round_s: float
    ) -> tuple[list[int], float]:
        """Return the number of drafts of each request that brings the most tokens per second.

        And how many times as many as none at all.
        """
        count = len(request_ids)
        limits = np.array(most)
        chances = self._acceptance.chances(request_ids)
        depth = np.arange(chances.shape[1])
        where, depths = np.nonzero(depth[None, :] < limits[:, None])
        gains = chances[where, depths]
        order = np.argsort(-gains, kind="stable")  # chances fall along a draft, so its prefixes come first
        order = order[: max(1, int(_LARGER * self._steps.largest) - count)]
        seconds = self._steps.predict(count + np.arange(len(order) + 1))
        if seconds is None:
            return [min(each, 1) for each in most], 1.0
        tokens = count + np.concatenate([[0.0], np.cumsum(gains[order])])
        rounds = np.concatenate([[0], np.maximum.accumulate(depths[order] + 1)])
        speed = tokens / (seconds + round_s * rounds)
        best = int(speed.argmax())
        gain = float(speed[best] / speed[0])
        if gain < _MUST_GAIN:
            best = 0
        kept: list[int] = np.bincount(where[order[:best]], minlength=count).tolist()
        return kept, gain
