"""Which prefixes have been sent to which replica."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from conch.api import RoutedRequest


class PlacedPrefixes:
    """Remembers the prefixes of the prompts that one replica was sent, the latest `capacity` blocks of them.

    Two prompts share a block when they agree in all tokens up to its end and have the same salt. A replica
    may have evicted what is remembered here, so this is a hint and no promise.

    Parameters
    ----------
    capacity
        Blocks remembered at most.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def overlap(self, chain: Sequence[int]) -> int:
        """Return how many leading blocks of a chain (see `block_chain`) are remembered."""
        for index, block in enumerate(chain):
            if block not in self._blocks:
                return index
        return len(chain)

    def remember(self, chain: Sequence[int]) -> None:
        """Note that a prompt was sent, and forget what was not used for longest.

        A prefix is newer than what follows it: without the beginning the end would be of no use.
        """
        for block in reversed(chain):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


def block_chain(request: RoutedRequest, block_size: int) -> list[int]:
    """Return a number for each full block of a prompt, of all tokens up to its end and the salt.

    Never covers the last token: the engine computes that one in any case.
    """
    tokens = tuple(request.token_ids)
    chain: list[int] = []
    parent = hash(request.cache_salt)
    for end in range(block_size, len(tokens), block_size):
        parent = hash((parent, tokens[end - block_size : end]))
        chain.append(parent)
    return chain
