"""How often drafts are accepted, by request and by position in the draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

_PRIOR = 0.7
_PRIOR_TRIALS = 4.0
_OWN_TRIALS = 2.0
_KEPT = 0.97
_KEPT_OWN = 0.9
_NOTHING = (0.0, 0.0)


class Acceptance:
    """Estimates, the past fading.

    Parameters
    ----------
    most_drafts
        Positions in a draft.
    """

    def __init__(self, most_drafts: int) -> None:
        self._tries = np.full(most_drafts, _PRIOR_TRIALS)
        self._hits = np.full(most_drafts, _PRIOR * _PRIOR_TRIALS)
        self._own: dict[int, tuple[float, float]] = {}

    def learn(self, request_id: int, drafted: int, accepted: int) -> None:
        """Take in what became of one draft: its first `accepted` tokens were right, the next was not."""
        tried = min(accepted + 1, drafted)
        self._tries[:tried] = _KEPT * self._tries[:tried] + 1
        self._hits[:tried] *= _KEPT
        self._hits[:accepted] += 1
        tries, hits = self._own.get(request_id, _NOTHING)
        self._own[request_id] = (_KEPT_OWN * tries + tried, _KEPT_OWN * hits + accepted)

    def forget(self, request_ids: Iterable[int]) -> None:
        """Drop what is known of requests."""
        for request_id in request_ids:
            self._own.pop(request_id, None)

    def tries(self, request_id: int) -> float:
        """Return how much is known of a request: drafted tokens that were looked at, the past fading."""
        return self._own.get(request_id, _NOTHING)[0]

    def chances(self, request_ids: Sequence[int]) -> F64:
        """Chance that all drafts up to each position are accepted: float64 [requests, most_drafts].

        A position's own rate, drawn towards that of the request as more of it is known.
        """
        own = np.array([self._own.get(request_id, _NOTHING) for request_id in request_ids])
        rates = (own[:, 1:] + _OWN_TRIALS * self._hits / self._tries) / (own[:, :1] + _OWN_TRIALS)
        chances: F64 = np.cumprod(rates, axis=1)
        return chances
