"""What the KV pool would hold, in integers instead of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from conch.api import Arena, Move

_MODULUS = (1 << 61) - 1


def history(token_ids: Iterable[int], salt: str = "") -> list[int]:
    """For each token a number that stands for it and all before it, as its KV does.

    Different salts give different numbers, so that KV which is shared against the rules is found out.
    """
    value = sum(ord(letter) * 131**index for index, letter in enumerate(salt)) % _MODULUS
    values = []
    for token_id in token_ids:
        value = (value * 1_000_003 + token_id + 1) % _MODULUS
        values.append(value)
    return values


class ShadowPool:
    """A KV pool in which each token's place holds its `history`.

    Parameters
    ----------
    num_blocks
        Blocks in the pool.
    block_size
        Tokens in a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._content: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._elsewhere: dict[tuple[Arena, int], list[int | None]] = defaultdict(lambda: [None] * block_size)

    def move(self, moves: Iterable[Move]) -> tuple[int, ...]:
        """Copy blocks in order, within the pool and between it and other arenas; returns which failed."""
        for move in moves:
            block = list(self._slot(move.source_arena, move.source))
            self._slot(move.target_arena, move.target)[:] = block
        return ()

    def write(self, table: Sequence[int], values: Sequence[int], start: int, end: int) -> None:
        """Compute the KV of tokens ``[start, end)``."""
        for position in range(start, end):
            block, offset = divmod(position, self._block_size)
            self._content[table[block]][offset] = values[position]

    def check(self, table: Sequence[int], values: Sequence[int], end: int, start: int = 0) -> None:
        """Raise AssertionError where the KV of tokens ``[start, end)`` is not that of `values`."""
        for position in range(start, end):
            block, offset = divmod(position, self._block_size)
            found = self._content[table[block]][offset]
            assert found == values[position], f"wrong KV at token {position}, in block {table[block]}"

    def _slot(self, arena: Arena, slot: int) -> list[int | None]:
        return self._content[slot] if arena is Arena.DEVICE else self._elsewhere[arena, slot]
