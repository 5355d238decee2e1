"""What becomes of a request whose engine died."""

from __future__ import annotations

from typing import Protocol

from conch.api.config import EngineConfig
from conch.engine.protocol import AddRequest


class Replays(Protocol):
    """The requests that another engine can take over from the start. Only the responder's thread calls it."""

    def keep(self, message: AddRequest) -> None:
        """Note a request that has just arrived."""

    def drop(self, request_id: int) -> None:
        """Note that a request has ended, or that its client has seen some of the answer."""

    def take(self, request_id: int) -> AddRequest | None:
        """Hand a request out, to be served again; never a second time, as it may be what kills engines."""


class NoReplays:
    """All requests of a dead engine fail."""

    def keep(self, message: AddRequest) -> None:
        """Do nothing."""

    def drop(self, request_id: int) -> None:
        """Do nothing."""

    def take(self, request_id: int) -> AddRequest | None:
        """Have none."""
        return None


class KeptRequests:
    """Requests whose clients have seen nothing yet are served again, once."""

    def __init__(self) -> None:
        self._messages: dict[int, AddRequest] = {}

    def keep(self, message: AddRequest) -> None:
        """Remember it."""
        self._messages[message.request_id] = message

    def drop(self, request_id: int) -> None:
        """Forget it."""
        self._messages.pop(request_id, None)

    def take(self, request_id: int) -> AddRequest | None:
        """Hand it out and forget it."""
        return self._messages.pop(request_id, None)


def make_replays(config: EngineConfig) -> Replays:
    """Return what `on_replica_failure` asks for."""
    return KeptRequests() if config.on_replica_failure == "replay" else NoReplays()
