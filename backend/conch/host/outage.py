"""What becomes of requests that come while the engine is being started again."""

from __future__ import annotations

import threading
from collections.abc import Callable

from conch.engine.protocol import AddRequest
from conch.host.engine_client import Session

HOLD_S = 10.0
"""An engine is usually back by then; a client that would wait longer is better told so."""


class Outage:
    """Holds requests for up to `HOLD_S` from the engine's death, and none from then on.

    Only the responder's thread calls it.

    Parameters
    ----------
    on_too_long
        Called from a thread of its own when an outage has lasted `HOLD_S`.
    """

    def __init__(self, on_too_long: Callable[[], None]) -> None:
        self._on_too_long = on_too_long
        self._held: list[AddRequest] = []
        self._has_patience = True
        self._timer: threading.Timer | None = None
        self.session: Session | None = None

    def begin(self) -> None:
        """Note that the engine is gone."""
        self.close()
        self.session = None
        self._has_patience = True
        self._timer = threading.Timer(HOLD_S, self._on_too_long)
        self._timer.daemon = True
        self._timer.start()

    def end(self, session: Session) -> None:
        """Note that an engine serves."""
        self.close()
        self.session = session

    def lose_patience(self) -> None:
        """Note that the outage has lasted too long."""
        self._has_patience = False

    def hold(self, message: AddRequest) -> None:
        """Keep a request."""
        self._held.append(message)

    def take_due(self) -> list[AddRequest]:
        """Return the requests whose waiting is over, either way."""
        if self.session is None and self._has_patience:
            return []
        due, self._held = self._held, []
        return due

    def close(self) -> None:
        """Stop the clock."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
