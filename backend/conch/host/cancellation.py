"""Notices clients that have left."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable

from conch.host.live import LiveRequest, LiveTable

PERIOD_S = 0.1


class CancellationWatcher:
    """Asks Triton about every live request each `PERIOD_S`, and sleeps while there is none.

    Asking takes 0.1 to 2 ms each. When a round takes long the pause is at least as long as the round, so that
    no more than half of a core is ever spent on it.

    Parameters
    ----------
    live
        The requests to ask about.
    on_gone
        Called with the id of a request whose client has left.
    """

    def __init__(self, live: LiveTable, on_gone: Callable[[int], None]) -> None:
        self._live = live
        self._on_gone = on_gone
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="conch-cancellation", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End the thread; the table must be closed too."""
        self._closed.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        told: set[int] = set()
        while self._live.wait_for_any():
            began = time.monotonic()
            self._ask_all(told)
            took = time.monotonic() - began
            if self._closed.wait(max(PERIOD_S - took, took)):
                return

    def _ask_all(self, told: set[int]) -> None:
        """Ask about each request once. No request is referred to when this returns."""
        ids = self._live.ids()
        told.intersection_update(ids)
        for request_id in ids:
            request = self._live.get(request_id)
            if request is not None and request_id not in told and _is_gone(request):
                told.add(request_id)
                self._on_gone(request_id)


def _is_gone(request: LiveRequest) -> bool:
    try:
        return request.sender.is_cancelled()
    except Exception:  # one request that cannot be asked about must not hide the others
        traceback.print_exc(file=sys.stderr)
        return False
