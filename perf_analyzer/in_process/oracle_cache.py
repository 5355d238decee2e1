"""The best that any prefix cache can do: it never forgets, and a prefix may end at any token."""

from __future__ import annotations

from collections.abc import Iterable

ROOT = 0


class OracleCache:
    """A tree over the tokens of all that was ever inserted."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}

    def longest(self, tokens: Iterable[int]) -> int:
        """Return how many leading tokens are known."""
        node, count = ROOT, 0
        for token in tokens:
            found = self._nodes.get((node, token))
            if found is None:
                break
            node, count = found, count + 1
        return count

    def insert(self, tokens: Iterable[int], node: int = ROOT) -> int:
        """Know these tokens behind a node; returns the node where they end, to go on from."""
        for token in tokens:
            node = self._nodes.setdefault((node, token), len(self._nodes) + 1)
        return node
