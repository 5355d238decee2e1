"""How long a step takes by the tokens in it, as measured."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_WEIGHT = 0.2
_MOST_SAMPLES = 5


class StepTimes:
    """Running means over steps of about the same size; others are on the straight lines between them."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float, int]] = {}
        self._points: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None = None

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Take a measured step in."""
        bucket = _bucket(num_tokens)
        tokens, mean, count = self._means.get(bucket, (float(num_tokens), seconds, 0))
        weight = max(_WEIGHT, 1 / (count + 1)) if count < _MOST_SAMPLES else _WEIGHT
        if count >= _MOST_SAMPLES:
            seconds = min(seconds, 4 * mean)  # a hiccup of the machine says nothing about the size
        self._means[bucket] = (
            tokens + weight * (num_tokens - tokens),
            mean + weight * (seconds - mean),
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
        return found

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
