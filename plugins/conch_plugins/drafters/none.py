"""No speculation."""

from __future__ import annotations

from collections.abc import Sequence

from conch.api import DraftContext


class NoDrafter:
    """Guesses nothing."""

    def propose(self, context: DraftContext) -> list[tuple[int, ...]]:
        """Return an empty guess for each row."""
        return [()] * len(context.request_ids)

    def forget(self, request_ids: Sequence[int]) -> None:
        """Have nothing to drop."""
