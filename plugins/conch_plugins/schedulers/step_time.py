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

_SCALES = (1.0, 100.0, 10.0, 10_000.0, 100_000.0)
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
    prefill_pairs
        Tokens of rows of more than one, times the tokens that each of them attends to.
    """

    prefill_tokens: int = 0
    decode_rows: int = 0
    context_tokens: int = 0
    prefill_pairs: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> StepLoad:
        """Add up a plan."""
        prefill = decodes = context = pairs = 0
        for row in plan.rows:
            context += row.start + row.count
            if row.count == 1:
                decodes += 1
            else:
                prefill += row.count
                pairs += row.count * (row.start + row.count // 2)
        return cls(prefill, decodes, context, pairs)

    @property
    def features(self) -> list[float]:
        """The loads, scaled, behind a constant."""
        loads = (1.0, self.prefill_tokens, self.decode_rows, self.context_tokens, self.prefill_pairs)
        return [load / scale for load, scale in zip(loads, _SCALES, strict=True)]


class StepTimeModel:
    """Seconds of a step: a constant, and a coefficient times each load of a `StepLoad`.

    Fitted by recursive least squares with forgetting: each step moves the coefficients as far as it tells
    something new, and what was learned fades over some hundred steps. Coefficients below 0 count as 0.
    """

    def __init__(self) -> None:
        count = len(_SCALES)
        self._coefficients = [0.0] * count
        self._covariance = [[_UNSURE * (row == column) for column in range(count)] for row in range(count)]
        self._seen: set[int] = set()  # loads that have been other than 0
        self.num_observed = 0

    def expect(self, load: StepLoad) -> float:
        """Return the seconds that a step will take."""
        return sum(max(0.0, c) * f for c, f in zip(self._coefficients, load.features, strict=True))

    def seconds_per_prefill_token(self, position: int) -> float:
        """Return what one more token of a prompt adds at a position, its share of the context included."""
        each = zip(self._coefficients, _SCALES, strict=True)
        _, prefill, _, context, pairs = (max(0.0, coefficient) / scale for coefficient, scale in each)
        return prefill + context + pairs * position

    def learn(self, load: StepLoad, seconds: float) -> None:
        """Take in a step."""
        features = load.features
        if self.num_observed > 2 * len(features):
            seconds = min(seconds, _MOST_SURPRISE * max(self.expect(load), _FLOOR))
        gains = [_dot(row, features) for row in self._covariance]
        self._seen |= {i for i, feature in enumerate(features) if feature}
        kept = _FORGETTING if sum(self._covariance[i][i] for i in self._seen) < _UNSURE else 1.0
        scale = kept + _dot(gains, features)
        error = seconds - _dot(self._coefficients, features)
        self._coefficients = [c + g / scale * error for c, g in zip(self._coefficients, gains, strict=True)]
        self._covariance = [
            [(old - gain * other / scale) / kept for old, other in zip(row, gains, strict=True)]
            for row, gain in zip(self._covariance, gains, strict=True)
        ]
        for i in range(len(features)):
            if i not in self._seen:
                self._covariance[i][i] = _UNSURE
        self.num_observed += 1


def _dot(left: Iterable[float], right: Iterable[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
