"""A process whose seconds pass only when it says so. Install it before the engine is imported."""

from __future__ import annotations

import time
from collections.abc import Callable


class SimulatedClock:
    """Stands for `time.monotonic` and `time.perf_counter` of the whole process."""

    def __init__(self) -> None:
        self._now_s = 1.0

    def install(self) -> SimulatedClock:
        """Take the place of the real clock."""
        now: Callable[[], float] = self.now
        time.monotonic = now
        time.perf_counter = now
        return self

    def now(self) -> float:
        """Return the seconds that have passed."""
        return self._now_s

    def wait_until(self, at_s: float) -> None:
        """Let time pass."""
        self._now_s = max(self._now_s, at_s)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds


class RealClock:
    """The machine's own."""

    def now(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def wait_until(self, at_s: float) -> None:
        """Sleep."""
        time.sleep(max(0.0, at_s - time.monotonic()))
