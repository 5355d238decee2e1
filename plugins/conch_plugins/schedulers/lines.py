"""Those who wait, indexed: who is first by one measure or another, without looking at all of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

from conch.api import Request, Requests

_SLACK = 64


class Index(Protocol):
    """Anything that wants to know who waits."""

    def add(self, request: Request) -> None:
        """Take in a request that waits; one that is there already stays as it is."""

    def remove(self, request_id: int) -> None:
        """Forget a request; one that is not there is ignored."""


def follow(requests: Requests, index: Index) -> None:
    """Tell an index who came to wait, and who left without being served, since the last plan."""
    for request in requests.arrived:
        index.add(request)
    for request_id in requests.departed:
        index.remove(request_id)


class Ranking:
    """Requests by a key that does not change while they are here, those of the same key by age.

    Entries of those who left stay in the heap until they come up, or are most of it.

    Parameters
    ----------
    key
        Smaller is sooner.
    """

    def __init__(self, key: Callable[[Request], float]) -> None:
        self._key = key
        self._heap: list[tuple[float, int]] = []
        self._here: dict[int, tuple[float, Request]] = {}

    def __len__(self) -> int:
        return len(self._here)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._here

    def get(self, request_id: int) -> Request | None:
        """Return a request that is here, or None."""
        here = self._here.get(request_id)
        return None if here is None else here[1]

    def add(self, request: Request) -> None:
        """Take in a request."""
        if request.id in self._here:
            return
        key = self._key(request)
        self._here[request.id] = (key, request)
        heapq.heappush(self._heap, (key, request.id))

    def remove(self, request_id: int) -> None:
        """Forget a request."""
        self._here.pop(request_id, None)
        if len(self._heap) > 2 * len(self._here) + _SLACK:
            self._heap = [(key, request_id) for request_id, (key, _) in self._here.items()]
            heapq.heapify(self._heap)

    def first(self) -> Request | None:
        """Return the request of the smallest key, or None."""
        while self._heap:
            key, request_id = self._heap[0]
            here = self._here.get(request_id)
            if here is not None and here[0] == key:
                return here[1]
            heapq.heappop(self._heap)
        return None


def age_rank(request: Request) -> float:
    """Order of arrival."""
    return request.id


def size_rank(request: Request) -> float:
    """Fewest tokens first, whatever the prefix cache has of them."""
    return request.num_tokens


class RankedLine:
    """A line by a key; the shortest may go past. Implements `conch.api.Line`.

    Parameters
    ----------
    key
        Smaller is sooner; equal keys are ordered by age. Of a running request it says where it would stand.
    """

    def __init__(self, key: Callable[[Request], float] = age_rank) -> None:
        self._key = key
        self._order = Ranking(key)
        self._sizes = Ranking(size_rank)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._order

    def add(self, request: Request) -> None:
        """Take in a request."""
        self._order.add(request)
        self._sizes.add(request)

    def remove(self, request_id: int) -> None:
        """Forget a request."""
        self._order.remove(request_id)
        self._sizes.remove(request_id)

    def first(self) -> Request | None:
        """Return the first by the key."""
        return self._order.first()

    def shortest(self) -> Request | None:
        """Return whoever has the fewest tokens."""
        return self._sizes.first()

    def rank(self, request: Request) -> tuple[float, int]:
        """Return where a request stands."""
        return self._key(request), request.id

    def precedes(self, waiting: Request, running: Request) -> bool:
        """Compare keys."""
        return self.rank(waiting) < self.rank(running)

    def leave(self, request: Request) -> None:
        """Note an admission."""
        self.remove(request.id)

    def give_way(self, waiting: Request) -> Request | None:
        """Nobody."""
        return None
