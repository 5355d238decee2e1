"""Recent outputs, and where in them two tokens stand next to each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

_GAP = -1
_MOST_PLACES = 32
KEY_TOKENS = 2


class Corpus:
    """The tokens of the latest outputs in a ring, and for each pair of tokens its latest places.

    Outputs are set apart by a token that nobody has. What is overwritten leaves the index.

    Parameters
    ----------
    capacity
        Tokens kept.
    max_outputs
        Outputs kept.
    """

    def __init__(self, capacity: int, max_outputs: int) -> None:
        self._ring = np.full(capacity, _GAP, np.int32)
        self._max_outputs = max_outputs
        self._starts: deque[int] = deque()
        self._places: dict[tuple[int, int], list[int]] = {}
        self._head = 0
        self._tail = 0

    def __len__(self) -> int:
        return self._head - self._tail

    def add(self, tokens: Sequence[int]) -> None:
        """Add an output in place of the oldest ones where there is no room; of a long one its end."""
        kept = list(tokens)[1 - len(self._ring) :]
        if self._max_outputs == 0 or len(kept) <= KEY_TOKENS:
            return
        while self._starts and (
            len(self._starts) >= self._max_outputs or len(self) + len(kept) + 1 > len(self._ring)
        ):
            self._drop_oldest()
        self._starts.append(self._head)
        for offset, token in enumerate([*kept, _GAP]):
            self._ring[(self._head + offset) % len(self._ring)] = token
        for offset, pair in enumerate(pairwise(kept), start=1):
            places = self._places.setdefault(pair, [])
            places.append(self._head + offset)
            if len(places) > _MOST_PLACES:
                del places[0]
        self._head += len(kept) + 1

    def places(self, first: int, second: int) -> npt.NDArray[np.int64]:
        """Return where `second` stands right after `first`: absolute, rising; the latest few."""
        return np.array(self._places.get((first, second), ()), np.int64)

    def window(self, places: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Return the tokens at each place plus each offset: int32 [places, offsets]; gaps past the ends."""
        at = places[:, None] + offsets
        found = self._ring[at % len(self._ring)]
        return np.where((at >= self._tail) & (at < self._head), found, _GAP)

    def _drop_oldest(self) -> None:
        start = self._starts.popleft()
        end = self._starts[0] if self._starts else self._head
        kept = self._ring[np.arange(start, end - 1) % len(self._ring)].tolist()
        for offset, pair in enumerate(pairwise(kept), start=1):
            places = self._places.get(pair)
            if places and places[0] == start + offset:
                del places[0]
                if not places:
                    del self._places[pair]
        self._tail = end
