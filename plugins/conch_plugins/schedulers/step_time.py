"""How long a step takes, learned from the steps themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from conch.api import StepPlan

_FORGETTING = 0.995
_UNSURE = 1e4
"""Variance of what nothing is known of; forgetting stops before more is forgotten than was ever known."""

_FLOOR = 1e-9
_MOST_SURPRISE = 4.0
"""A step that took this many times what was expected counts as that: an interruption teaches nothing."""

_SCALES = (1.0, 100.0, 10.0, 10_000.0)
"""Brings the loads of usual steps near 1, where the recursion is well conditioned."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step has to do.

    Attributes
    ----------
    prefill_tokens
        Tokens of rows of more than one.
    decode_rows
        Rows of one token.
    context_tokens
        Tokens that rows attend to.
    """

    prefill_tokens: int = 0
    decode_rows: int = 0
    context_tokens: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> StepLoad:
        """Add up a plan."""
        prefill = decodes = context = 0
        for row in plan.rows:
            context += row.start + row.count
            if row.count == 1:
                decodes += 1
            else:
                prefill += row.count
        return cls(prefill, decodes, context)

    @property
    def features(self) -> list[float]:
        """The loads, scaled, behind a constant."""
        loads = (1.0, self.prefill_tokens, self.decode_rows, self.context_tokens)
        return [load / scale for load, scale in zip(loads, _SCALES, strict=True)]


class StepTimeModel:
    """Seconds of a step as ``a + b * prefill tokens + c * decode rows + d * context tokens``.

    Fitted by recursive least squares with forgetting: each step moves the coefficients as far as it tells
    something new, and what was learned fades over some hundred steps. Coefficients below 0 count as 0.
    """

    def __init__(self) -> None:
        self._coefficients = [0.0] * 4
        self._covariance = [[_UNSURE * (row == column) for column in range(4)] for row in range(4)]
        self.num_observed = 0

    def expect(self, load: StepLoad) -> float:
        """Return the seconds that a step will take."""
        return sum(max(0.0, c) * f for c, f in zip(self._coefficients, load.features, strict=True))

    @property
    def seconds_per_prefill_token(self) -> float:
        """What one more token of a prompt adds, its share of the context included."""
        prefill, context = self._coefficients[1] / _SCALES[1], self._coefficients[3] / _SCALES[3]
        return max(0.0, prefill) + max(0.0, context)

    def learn(self, load: StepLoad, seconds: float) -> None:
        """Take in a step."""
        features = load.features
        if self.num_observed > 2 * len(features):
            seconds = min(seconds, _MOST_SURPRISE * max(self.expect(load), _FLOOR))
        gains = [_dot(row, features) for row in self._covariance]
        kept = _FORGETTING if sum(self._covariance[i][i] for i in range(4)) < _UNSURE else 1.0
        scale = kept + _dot(gains, features)
        error = seconds - _dot(self._coefficients, features)
        self._coefficients = [c + g / scale * error for c, g in zip(self._coefficients, gains, strict=True)]
        self._covariance = [
            [(old - gain * other / scale) / kept for old, other in zip(row, gains, strict=True)]
            for row, gain in zip(self._covariance, gains, strict=True)
        ]
        self.num_observed += 1


def _dot(left: Iterable[float], right: Iterable[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
