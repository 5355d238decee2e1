"""What drafting adds to a step, as measured."""

from __future__ import annotations

import numpy as np

from conch.worker.step_times import StepTimes

_WEIGHT = 0.1
_LEAST_S = 1e-6


class DraftingTimes:
    """Seconds for each draft in a row, by the number of requests that draft.

    What a step without drafts costs the drafter (a head keeps up with the target) is not due to drafts.
    """

    def __init__(self) -> None:
        self._rounds = StepTimes()
        self._standing_s: float | None = None

    def learn(self, num_requests: int, rounds: int, seconds: float) -> None:
        """Take in how long it took to draft up to `rounds` tokens for each."""
        own_s = seconds - (self._standing_s or 0.0)
        self._rounds.learn(num_requests, max(_LEAST_S, own_s / rounds))

    def learn_standing(self, seconds: float) -> None:
        """Take in how long the drafter took in a step in which nothing was drafted."""
        known = seconds if self._standing_s is None else self._standing_s
        self._standing_s = known + _WEIGHT * (seconds - known)

    def round_s(self, num_requests: int) -> float:
        """Return seconds for one more token of each request; 0 while nothing is known."""
        found = self._rounds.predict(np.array([num_requests]))
        return 0.0 if found is None else float(found[0])
