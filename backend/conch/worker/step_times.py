"""How long a step takes by the tokens in it, as measured."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_WEIGHT = 0.1
_PACE_WEIGHT = 0.2
_FEW = 4
_FARTHEST = math.log(2.0)
"""What took more than twice as long as was to be expected, or less than half, counts as just that."""


class StepTimes:
    """Means over steps of about the same size, times a pace; sizes between lie on the straight lines.

    The pace is what steps of all sizes have in common: a machine that gets slower, contexts that grow. It is
    learnt quickly, from steps of whatever size, and the means slowly. So two sizes stay comparable though
    they were never measured at the same time.
    """

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float, int]] = {}
        self._pace = 1.0
        self._points: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None = None

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Take a measured step in."""
        bucket = _bucket(num_tokens)
        if bucket not in self._means:
            self._means[bucket] = (float(num_tokens), seconds / self._pace, 1)
            self._points = None
            return
        tokens, mean, count = self._means[bucket]
        off = math.log(seconds / (self._pace * mean))
        weight = max(_WEIGHT, 1 / (count + 1))
        if count >= _FEW:
            off = min(max(off, -_FARTHEST), _FARTHEST)  # a hiccup of the machine says nothing about the size
            self._pace *= math.exp(_PACE_WEIGHT * off)
            off *= 1 - _PACE_WEIGHT
        self._means[bucket] = (
            tokens + weight * (num_tokens - tokens),
            mean * math.exp(weight * off),
            count + 1,
        )
        self._points = None

    def predict(self, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64] | None:
        """Return seconds for each number of tokens; None while nothing is known."""
        if not self._means:
            return None
        if self._points is None:
            known = sorted(self._means.values())
            tokens = np.array([each[0] for each in known])
            seconds = np.array([each[1] for each in known])
            # fewer tokens never take longer: where they seem to, something else held the step up
            self._points = tokens, np.minimum.accumulate(seconds[::-1])[::-1]
        tokens, seconds = self._points
        found = np.interp(num_tokens, tokens, seconds)
        if len(tokens) > 1:
            slope = (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2])
            found += slope * np.maximum(num_tokens - tokens[-1], 0)
        return self._pace * found

    @property
    def largest(self) -> float:
        """Tokens of the largest steps that were measured; 0 while none was."""
        return max(self._means.values())[0] if self._means else 0.0


def _bucket(num_tokens: int) -> int:
    """Give each size up to 4 a number, and four numbers to each doubling after that."""
    if num_tokens <= 4:
        return num_tokens
    power = num_tokens.bit_length() - 1
    return 4 * power + ((num_tokens >> (power - 2)) & 3)
