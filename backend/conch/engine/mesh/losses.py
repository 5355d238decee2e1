"""Which ranks are lost, and which of them is the reason."""

from __future__ import annotations

import threading
from collections.abc import Callable

_SETTLED_S = 0.3
"""How long after the first loss others are still its companions: who depends on a dead rank fails, too."""


class Losses:
    """Collects what becomes of ranks; any thread may add.

    Parameters
    ----------
    tell
        Called once, from a thread of its own, with what is to be said of the first loss and its companions.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._changed = threading.Condition()
        self._causes: list[str] = []
        self._failures: list[str] = []
        self._timer: threading.Timer | None = None
        self._is_settled = False

    def add(self, what: str, has_said_why: bool) -> None:
        """Note a loss.

        Parameters
        ----------
        has_said_why
            Whether the rank itself has told its failure: that may be the consequence of another's end, which
            nobody could tell.
        """
        with self._changed:
            (self._failures if has_said_why else self._causes).append(what)
            if self._timer is None:
                self._timer = threading.Timer(_SETTLED_S, self._settle)
                self._timer.daemon = True
                self._timer.start()
                self._changed.notify_all()

    def find(self, within_s: float) -> str | None:
        """Say which rank is lost and why; None where none is within that time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._timer is not None, within_s):
                return None
            self._changed.wait_for(lambda: self._is_settled)
            return "; ".join(self._causes or self._failures)

    def _settle(self) -> None:
        with self._changed:
            self._is_settled = True
            told = "; ".join(self._causes or self._failures)
            self._changed.notify_all()
        self._tell(told)
