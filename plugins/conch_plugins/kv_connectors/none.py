"""No moving of KV."""

from __future__ import annotations

from collections.abc import Sequence


class NoKVConnector:
    """Declines every offer and has nothing to pull."""

    def offer(self, request_id: int, blocks: Sequence[int]) -> bytes | None:
        """Decline."""
        return None

    def pull(self, handle: bytes, blocks: Sequence[int]) -> bool:
        """Find nothing to pull."""
        return False

    def release(self, request_id: int) -> None:
        """Have nothing to withdraw."""
