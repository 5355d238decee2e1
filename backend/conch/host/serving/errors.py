"""What keeps a server from being started."""

from __future__ import annotations

from conch.api.errors import ConchError


class ServeError(ConchError):
    """The server cannot be started as asked; the message says what to change."""
