"""Which tokens of one row min_p, top_k and top_p keep, found on the host among the likeliest few.

Of a vocabulary of many thousands a handful hold nearly all of the probability. So only tokens above a cut are
looked at and sorted, and the cut is lowered when they do not settle it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_CUTS = (1e-3, 1e-6, 0.0)

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowFilter:
    """What one row keeps, and the random number that it draws with; see `conch.worker.drawing`."""

    top_k: int
    top_p: float
    min_p: float
    uniform: float


def kept_tokens(weights: F32, total: float, row: RowFilter) -> I64:
    """Return the tokens kept of weights [V], in order of the vocabulary.

    Parameters
    ----------
    weights
        Probabilities up to a factor; the largest is 1.
    total
        Their sum.
    """
    is_limited = 0 < row.top_k < len(weights)
    top_k = row.top_k if is_limited else len(weights)
    cuts: tuple[float | np.float32, ...] = _CUTS
    if row.min_p > 0:
        threshold = np.float32(row.min_p)
        cuts, total = (threshold,), weights.sum(dtype=np.float64, where=weights >= threshold)
    elif is_limited:
        total = math.inf  # that of the top_k likeliest is not known before there are as many
    for cut in cuts:
        token_ids = np.flatnonzero(weights >= cut)
        values = weights[token_ids]
        ordered = np.sort(values)[::-1]
        count = _count(ordered, total, top_k, row.top_p)
        if count <= len(ordered):
            break
    if count >= len(ordered):
        return token_ids
    least = ordered[count - 1]
    kept = values > least
    equal = np.flatnonzero(values == least)
    kept[equal[: count - np.count_nonzero(kept)]] = True
    chosen: I64 = token_ids[kept]
    return chosen


def draw_token(weights: F32, total: float, row: RowFilter) -> int:
    """Draw one of the tokens kept, as `conch.worker.drawing.draw` does."""
    token_ids = kept_tokens(weights, total, row)
    cumulative = weights[token_ids].cumsum(dtype=np.float64)
    last = cumulative[-1]
    target = min(row.uniform * last, np.nextafter(last, 0.0))
    return int(token_ids[np.searchsorted(cumulative, target, side="right")])


def _count(ordered: F32, total: float, top_k: int, top_p: float) -> int:
    """Return how many likeliest tokens are kept; more than `ordered` has where it does not tell.

    top_p is a share of what top_k leaves.
    """
    if top_p >= 1:
        return top_k
    cumulative = ordered.cumsum(dtype=np.float64)
    if top_k <= len(ordered):
        total = cumulative[top_k - 1]
    return min(int(cumulative.searchsorted(top_p * total)) + 1, top_k)
