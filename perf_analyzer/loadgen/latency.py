"""From timestamps to figures: TTFT, TPOT, ITL, throughput.

TTFT  time to first token: from sending the request to the first response that carries tokens.
ITL   inter-token latency: each gap between two such responses of one request, as a reader feels it. A
      response that carries several tokens closes one gap, so ITL shows stalls and not the mean rate.
TPOT  time per output token: (last - first) / (tokens - tokens of the first), one value for each request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Arrival:
    """A response that carried tokens.

    Attributes
    ----------
    at_s
        Seconds on the clock of `Trace.sent_s`.
    """

    at_s: float
    num_tokens: int


@dataclass(frozen=True)
class Trace:
    """What a client saw of one request.

    Attributes
    ----------
    sent_s
        When it was sent; all times of one run are on one clock.
    arrivals
        Responses that carried tokens, in order.
    finish_reason, error
        How it ended, as the server says; both None where the client left.
    num_finals, num_after_final
        Responses marked final, and responses that came after one.
    num_prompt
        Prompt tokens as the server counted them, None where it did not say.
    text, output_ids
        All deltas joined; ids are empty where the server sends none.
    """

    sent_s: float
    arrivals: tuple[Arrival, ...]
    finish_reason: str | None = None
    error: str | None = None
    cancelled: bool = False
    num_finals: int = 0
    num_after_final: int = 0
    num_prompt: int | None = None
    text: str = ""
    output_ids: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Output tokens received."""
        return sum(arrival.num_tokens for arrival in self.arrivals)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first token, None where there was none."""
        return self.arrivals[0].at_s - self.sent_s if self.arrivals else None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first response; None where nothing followed it."""
        later = self.num_tokens - self.arrivals[0].num_tokens if self.arrivals else 0
        return (self.arrivals[-1].at_s - self.arrivals[0].at_s) / later if later else None

    @property
    def total_s(self) -> float | None:
        """Seconds from sending to the last token, None where there was none."""
        return self.arrivals[-1].at_s - self.sent_s if self.arrivals else None

    def gaps(self, start_s: float = float("-inf"), end_s: float = float("inf")) -> list[float]:
        """Return the inter-token gaps, in seconds, that overlap the open interval ``(start_s, end_s)``."""
        times = [arrival.at_s for arrival in self.arrivals]
        return [b - a for a, b in pairwise(times) if b > start_s and a < end_s]


def percentile(values: Sequence[float], rank: float) -> float:
    """Return the percentile `rank` in [0, 100], interpolated linearly between the nearest values.

    Raises
    ------
    ValueError
        `values` is empty: there is no percentile of nothing.
    """
    if not values:
        raise ValueError("no values to take a percentile of")
    return float(np.percentile(np.asarray(values, dtype=np.float64), rank))


def spread_ms(values_s: Sequence[float]) -> dict[str, float] | None:
    """Summarise seconds as milliseconds: mean, p50, p99 and max; None where there are no values."""
    if not values_s:
        return None
    return {
        "mean": round(1e3 * sum(values_s) / len(values_s), 3),
        "p50": round(1e3 * percentile(values_s, 50), 3),
        "p99": round(1e3 * percentile(values_s, 99), 3),
        "max": round(1e3 * max(values_s), 3),
    }


def duration_s(traces: Sequence[Trace]) -> float:
    """Return the seconds from the first request sent to the last token received."""
    ends = [trace.arrivals[-1].at_s for trace in traces if trace.arrivals]
    return max(ends) - min(trace.sent_s for trace in traces) if ends else 0.0


def summarise(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return counts, throughput and the spreads of TTFT, TPOT, ITL and total time over `traces`."""
    seconds = duration_s(traces)
    tokens = sum(trace.num_tokens for trace in traces)
    return {
        "requests": len(traces),
        "errors": sum(trace.error is not None for trace in traces),
        "output_tokens": tokens,
        "duration_s": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 2) if seconds else 0.0,
        "ttft_ms": spread_ms(_known(trace.ttft_s for trace in traces)),
        "tpot_ms": spread_ms(_known(trace.tpot_s for trace in traces)),
        "itl_ms": spread_ms([gap for trace in traces for gap in trace.gaps()]),
        "total_ms": spread_ms(_known(trace.total_s for trace in traces)),
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
