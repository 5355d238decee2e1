"""Ranks that only listen, to test a parallelism without processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from conch.api import Arena, Worker
from conch.api.mesh import RankJoined, RankNews, RankOrder, RankReady, Seat


@dataclass
class ListeningRank:
    """A rank that keeps what all but the first one must: the tokens of each request.

    Attributes
    ----------
    seat
        Its place.
    news
        What it still has to say.
    orders
        What it was told.
    ended
        How often it was told to end.
    whence
        Where it is said to come from.
    """

    seat: Seat
    news: list[RankNews]
    orders: list[RankOrder] = field(default_factory=list)
    ended: int = 0
    whence: str = "nowhere"
    _tokens: dict[int, list[int]] = field(default_factory=dict)

    def send(self, order: RankOrder) -> None:
        """Take an order. Fails when a row has tokens that this rank cannot know."""
        self.orders.append(order)
        plan = order.plan
        for request_id, token_ids in order.learned:
            if request_id in self._tokens:
                self._tokens[request_id] += token_ids
        for request_id in (*plan.preempted, *plan.finished):
            self._tokens.pop(request_id, None)
        for admission in plan.admitted:
            self._tokens[admission.request_id] = list(admission.token_ids)
        for row in plan.rows if plan.admitted or self._tokens else ():
            known = len(self._tokens[row.request_id])
            assert row.start + row.count - len(row.drafts) <= known, (
                "computes a token that it has not heard of"
            )

    def receive(self, timeout_s: float | None) -> RankNews | None:
        """Say what is next."""
        return self.news.pop(0) if self.news else None

    def end(self, timeout_s: float) -> None:
        """Count."""
        self.ended += 1


class ListeningRanks:
    """Makes ranks that listen, and one worker.

    Parameters
    ----------
    factory
        Builds the worker.
    """

    def __init__(self, factory: Callable[[], Worker]) -> None:
        self._factory = factory
        self._sizes = RankReady(1 << 20, tuple(1 << 20 for _ in Arena))
        self.links: list[ListeningRank] = []

    def start(self, seat: Seat) -> ListeningRank:
        """Start one that has more blocks than any worker."""
        self.links.append(ListeningRank(seat, [RankJoined(), self._sizes]))
        return self.links[-1]

    def worker(self, seat: Seat) -> Worker:
        """Build the worker."""
        return self._factory()

    def find_loss(self) -> str | None:
        """Lose none."""
        return None
