"""SIGTERM inside Triton's stub, whose main thread runs no Python while it waits for requests."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


class TerminationWatch:
    """Calls back from a thread of its own when SIGTERM comes; must be made in the main thread.

    A Python signal handler would wait for the main thread, which sleeps in Triton's code. The wake-up file
    descriptor is written at once, by the part of the handler that is not Python.
    """

    def __init__(self, on_termination: Callable[[], None]) -> None:
        self._on_termination = on_termination
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._handler_before = signal.signal(signal.SIGTERM, lambda *_: None)
        self._descriptor_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="conch-termination", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Put things back; must be called in the main thread."""
        signal.set_wakeup_fd(self._descriptor_before)
        before = self._handler_before  # None where it was not set from Python; SIG_DFL is falsy, too
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        os.close(self._writing)
        self._thread.join()
        os.close(self._reading)

    def _run(self) -> None:
        while numbers := os.read(self._reading, 64):
            if signal.SIGTERM in numbers:
                self._on_termination()
