"""When a little is drafted although it does not pay, so that it is noticed when that changes."""

from __future__ import annotations

_FIRST = 4
_RAREST = 64
_MOST_MORE = 8
"""Steps between probes count for no more than this many times those before the last."""
_SHARE = 0.015
"""Of the time, that probes may take."""


class Probing:
    """Lets a step in four probe at first, ever fewer later, and none for more than a share of the time.

    What a probe will cost is taken from what the last one has cost, in proportion to the steps between, up to
    a bound: a draft model has to catch up with what it has missed, but one probe may just have been held up.
    Only the very first has nothing to go by.
    """

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._spent_s = self._worked_s = 0.0
        self.rest()

    def rest(self) -> None:
        """Begin anew, as often as at first, once drafts have paid; what probes have cost is not forgotten."""
        self._idle = 0
        self._next = _FIRST
        self._last = self._gap = 0
        self.is_under_way = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing paid in the last step."""
        return self._idle > 0

    def is_due(self) -> bool:
        """Note that nothing pays in this step; returns whether to probe in it."""
        self._idle += 1
        self.is_under_way = self._idle >= self._next and self._fits()
        if self.is_under_way:
            self._next = self._idle + min(self._idle, _RAREST)
            self._gap, self._last = self._idle - self._last, self._idle
        return self.is_under_way

    def work(self, seconds: float) -> None:
        """Take in how long a step took."""
        self._worked_s += seconds

    def spend(self, seconds: float) -> None:
        """Take in what the probe under way has cost."""
        self._last_s = seconds
        self._spent_s += seconds
        self.is_under_way = False

    def _fits(self) -> bool:
        if self._last_s is None:
            return True
        more = (self._idle - self._last) / self._gap if self._gap else 1.0
        expected_s = self._last_s * min(_MOST_MORE, more)
        return self._spent_s + expected_s <= _SHARE * self._worked_s
