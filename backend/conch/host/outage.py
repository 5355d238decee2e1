"""What becomes of requests that come while no engine serves."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from conch.api.errors import ErrorCode, RequestError
from conch.engine.protocol import AddRequest
from conch.host.session import Session

HOLD_S = 9.0
"""An engine is usually back by then; a client that would wait longer is better told so."""


class Outage:
    """Holds requests until an engine is back, each for `HOLD_S` at most; none once there is little hope.

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
        self._serving: set[Session] = set()

    def engine_down(self, session: Session) -> None:
        """Note that an engine is gone."""
        self._serving.discard(session)

    def engine_up(self, session: Session) -> None:
        """Note that an engine serves."""
        self._serving.add(session)
        self._has_hope = True

    @property
    def is_over(self) -> bool:
        """Whether some engine serves."""
        return bool(self._serving)

    def serves(self, session: Session | None) -> bool:
        """Whether this engine does."""
        return session in self._serving

    def lose_hope(self) -> None:
        """Note that no engine serves, and one fails to start again and again."""
        self._has_hope = False

    def hold(self, message: AddRequest) -> None:
        """Keep a request."""
        self._held.append((time.monotonic() + HOLD_S, message))

    def take_due(self) -> list[AddRequest]:
        """Return the requests whose waiting is over, whichever way."""
        self.close()
        now = time.monotonic()
        due = []
        while self._held and (self._serving or not self._has_hope or self._held[0][0] <= now):
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


def with_time_left(message: AddRequest, arrival_s: float) -> AddRequest:
    """Return a request that has waited here, with what is left of its time.

    Raises
    ------
    RequestError
        Nothing is left.
    """
    if message.timeout_s is None:
        return message
    left_s = message.timeout_s - (time.monotonic() - arrival_s)
    if left_s <= 0:
        raise RequestError("the request timed out while no engine served it", ErrorCode.TIMEOUT)
    return msgspec.structs.replace(message, timeout_s=left_s)
