"""The seam of routers: which replica of a model takes a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What a router knows of a request.

    Attributes
    ----------
    token_ids
        Its prompt.
    cache_salt
        Requests of different salts never share cached KV, whatever their prompts.
    """

    token_ids: Sequence[int]
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One replica as a router sees it.

    A replica tells how it is a few times a second. Requests placed on it since then are counted at once,
    where they probably are: running while it has seats and nobody is known to wait, else waiting. Requests
    that have ended since then are not counted. So a burst sees its own beginning.

    Attributes
    ----------
    engine
        The replica's engine process. Never given again: after a restart there is another one, which has
        nothing cached.
    running, waiting
        Requests; each of a request's `n` choices counts.
    kv_usage
        Share of KV blocks in use, in [0, 1].
    """

    engine: int
    running: int
    waiting: int
    kv_usage: float


@runtime_checkable
class Router(Protocol):
    """Chooses the replica for a request. Asked once for each request, never from two threads at once."""

    def place(self, request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> int:
        """Index into `loads` of the replica that takes the request.

        `loads` has those that serve now, at least one; they come and go from one request to the next.
        """
