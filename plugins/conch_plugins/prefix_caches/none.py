"""No prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from conch.api import Match, Move, PrefixCacheStats, Request


class NoPrefixCache:
    """Remembers nothing: every block is free once its last user leaves."""

    num_evictable = 0

    def match(self, request: Request) -> Match:
        """Find nothing."""
        return Match()

    def restore(self, request: Request, blocks: Sequence[int], num_tokens: int) -> int:
        """Bring nothing back."""
        return num_tokens

    def insert(self, request: Request, blocks: Sequence[int], num_computed: int) -> None:
        """Remember nothing."""

    def forget(self, request_id: int) -> None:
        """Have nothing to drop."""

    def holds(self, block: int) -> bool:
        """Hold nothing."""
        return False

    def discard(self, blocks: Sequence[int]) -> None:
        """Have nothing to forget."""

    def keep(self, block: int) -> bool:
        """Decline."""
        return False

    def reuse(self, block: int) -> None:
        """Have nothing to note."""

    def evict(self, count: int) -> list[int]:
        """Have nothing to give."""
        return []

    def take_moves(self) -> tuple[Move, ...]:
        """Move nothing."""
        return ()

    def end_step(self, moves: Sequence[Move], failed: Sequence[int]) -> None:
        """Note nothing."""

    def stats(self) -> PrefixCacheStats:
        """Have nothing."""
        return PrefixCacheStats()

    def close(self) -> None:
        """Have nothing to close."""
