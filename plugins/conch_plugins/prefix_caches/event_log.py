"""What a cache tells of itself while it works."""

from __future__ import annotations

from typing import Protocol

from conch.api import Arena
from conch_plugins.prefix_caches.trail import Trail


class EventLog(Protocol):
    """Told of every block that is stored or removed, in order. An entry stands for a block of tokens."""

    def name(self, entry: object, trail: Trail, index: int) -> None:
        """Learn what an entry that is about to be stored stands for: block `index` of a trail."""

    def stored(self, entry: object, arena: Arena) -> None:
        """Note that an entry lies in an arena now."""

    def removed(self, entry: object, arena: Arena) -> None:
        """Note that an entry lies in an arena no longer."""

    def publish(self) -> None:
        """Send what was noted since the last call."""

    def close(self) -> None:
        """Send no more."""


class NoEventLog:
    """Nobody listens."""

    def name(self, entry: object, trail: Trail, index: int) -> None:
        """Learn nothing."""

    def stored(self, entry: object, arena: Arena) -> None:
        """Note nothing."""

    def removed(self, entry: object, arena: Arena) -> None:
        """Note nothing."""

    def publish(self) -> None:
        """Send nothing."""

    def close(self) -> None:
        """Have nothing to close."""


SILENT = NoEventLog()
