"""What becomes of requests that come while the engine is being started again."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from conch.engine.protocol import AddRequest
from conch.host.engine_client import Session

HOLD_S = 9.0
"""An engine is usually back by then; a client that would wait longer is better told so."""


class Outage:
    """Holds requests until the engine is back, each for `HOLD_S` at most; none once there is little hope.

    Only the responder's thread calls it.

    Parameters
    ----------
    on_due
        Called from a thread of its own when the waiting of a request is over.
    """

    def __init__(self, on_due: Callable[[], None]) -> None:
        self._on_due = on_due
        self._held: deque[tuple[float, AddRequest]] = deque()
        self._has_hope = True
        self._timer: threading.Timer | None = None
        self.session: Session | None = None

    def begin(self) -> None:
        """Note that the engine is gone."""
        self.session = None

    def end(self, session: Session) -> None:
        """Note that an engine serves."""
        self.session = session
        self._has_hope = True

    def lose_hope(self) -> None:
        """Note that the engine fails to start again and again."""
        self._has_hope = False

    def hold(self, message: AddRequest) -> None:
        """Keep a request."""
        self._held.append((time.monotonic() + HOLD_S, message))

    def take_due(self) -> list[AddRequest]:
        """Return the requests whose waiting is over, whichever way."""
        self.close()
        now = time.monotonic()
        due = []
        while self._held and (self.session or not self._has_hope or self._held[0][0] <= now):
            due.append(self._held.popleft()[1])
        if self._held:
            self._timer = threading.Timer(self._held[0][0] - now, self._on_due)
            self._timer.daemon = True
            self._timer.start()
        return due

    def close(self) -> None:
        """Stop the clock."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
