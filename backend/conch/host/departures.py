"""Requests that have been answered, and of which their engine has yet to say its last word."""

from __future__ import annotations

from conch.api.steps import RequestOutput
from conch.host.session import Session


class Departures:
    """Choices whose usage is still to come, by request. Only the responder's thread calls it."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[Session, int]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def note(self, request_id: int, session: Session, choices: int) -> None:
        """Expect the last word on some choices of a request."""
        if choices:
            self._left[request_id] = (session, choices)

    def settle(self, output: RequestOutput) -> bool:
        """Take a last word; returns whether it was expected."""
        if output.request_id not in self._left:
            return False
        session, choices = self._left.pop(output.request_id)
        if output.failure is None:
            self.note(output.request_id, session, choices - (output.usage is not None))
        return True

    def forget(self, session: Session) -> None:
        """Expect nothing more from an engine that is gone."""
        self._left = {key: entry for key, entry in self._left.items() if entry[0] is not session}
