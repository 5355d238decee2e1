"""How torch's process groups find each other."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from conch.api.mesh import Meeting


class MeetingStore(dist.Store):  # type: ignore[name-defined, misc]
    """A meeting, as torch asks for it."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__()
        self._meeting = meeting

    def set(self, key: str, value: bytes) -> None:
        """Tell all ranks."""
        self._meeting.post(key, value)

    def get(self, key: str) -> bytes:
        """Return what a rank has told."""
        return self._meeting.read(key, self.timeout.total_seconds())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        for key in keys:
            self._meeting.read(key, (timeout or self.timeout).total_seconds())
