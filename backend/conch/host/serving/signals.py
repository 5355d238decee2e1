"""Waiting for signals, or for time to pass, in a loop."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType, TracebackType

_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class SignalWatch:
    """Turns signals into return values of `wait`, for the main thread, between enter and exit."""

    def __enter__(self) -> SignalWatch:
        """Take over the signals of interest."""
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(writer, False)
        self._writer = writer
        self._previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # What we were started with as ignored stays so: SIGHUP under nohup, SIGINT behind a shell's "&".
        watched = [number for number in _WATCHED if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, _let_pass) for number in watched}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give them back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._reader)
        os.close(self._writer)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a signal or the time-out; return whether we were told to stop.

        A child's end also ends the wait, early and with False.
        """
        readable, _, _ = select.select([self._reader], [], [], timeout_s)
        numbers = os.read(self._reader, 4096) if readable else b""
        return any(number != signal.SIGCHLD for number in numbers)


def _let_pass(number: int, frame: FrameType | None) -> None:
    """Let the wake-up descriptor speak."""
