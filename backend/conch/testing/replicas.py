"""Replicas without a model: seats, a queue and a prefix cache each, placed on by a router."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from conch.api import ReplicaLoad, RoutedRequest, Router


@dataclass(frozen=True)
class Arrival:
    """One request of a trace.

    Attributes
    ----------
    at_s
        When it arrives; traces are in order of it.
    output
        Tokens that it is answered with, one a step.
    leaves_at_s
        When its client leaves; None for one that stays.
    """

    at_s: float
    prompt: tuple[int, ...]
    output: int
    leaves_at_s: float | None = None


@dataclass(eq=False)
class _Live:
    arrival: Arrival
    owed: int = 0
    left: int = 0


class SimulatedReplica:
    """One engine. A step takes `STEP_S`, computes `BUDGET` prompt tokens and one token for each who decodes.

    Its prefix cache holds the blocks used last; what it tells of itself is up to `NEWS_S` old.
    """

    STEP_S, NEWS_S, BUDGET, BLOCK = 0.01, 0.05, 512, 16

    def __init__(self, engine: int, seats: int, cache_blocks: int) -> None:
        self.engine, self._seats, self._cache_blocks = engine, seats, cache_blocks
        self.waiting: deque[_Live] = deque()
        self.running: list[_Live] = []
        self._cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._told = (0, 0)
        self.placed = self.queried = self.found = 0

    @property
    def load(self) -> ReplicaLoad:
        """What a router is told: old news, and what was placed and has ended since (see `ReplicaLoad`)."""
        in_flight = len(self.running) + len(self.waiting)
        told_running, told_waiting = self._told
        running = min(in_flight, told_running if told_waiting else self._seats)
        return ReplicaLoad(self.engine, running, in_flight - running, running / self._seats)

    def add(self, arrival: Arrival) -> None:
        """Queue a request."""
        self.placed += 1
        self.waiting.append(_Live(arrival))

    def cancel(self, now_s: float) -> None:
        """End those whose clients have left."""
        self.waiting = deque(live for live in self.waiting if not _is_gone(live, now_s))
        self.running = [live for live in self.running if not _is_gone(live, now_s)]

    def step(self) -> None:
        """Admit, compute, and end who is done."""
        while self.waiting and len(self.running) < self._seats:
            self._admit(self.waiting.popleft())
        budget = self.BUDGET
        for live in self.running:
            if live.owed:
                paid = min(live.owed, budget)
                live.owed -= paid
                budget -= paid
            else:
                live.left -= 1
        self.running = [live for live in self.running if live.left > 0]

    def tell(self) -> None:
        """Send news of now."""
        self._told = (len(self.running), len(self.waiting))

    def _admit(self, live: _Live) -> None:
        prompt = live.arrival.prompt
        ends = range(self.BLOCK, len(prompt), self.BLOCK)
        found = 0
        for end in ends:
            if prompt[:end] not in self._cache:
                break
            found = end
        for end in reversed(ends):
            self._cache[prompt[:end]] = None
            self._cache.move_to_end(prompt[:end])
        while len(self._cache) > self._cache_blocks:
            self._cache.popitem(last=False)
        self.queried += len(prompt)
        self.found += found
        live.owed, live.left = len(prompt) - found, live.arrival.output
        self.running.append(live)


@dataclass
class ReplicaReport:
    """What a trace did to the replicas.

    Attributes
    ----------
    placed
        Requests that each replica was given.
    most_waiting_beside_idle
        Most requests that waited on one replica at the end of a step while another had nothing to do.
    hit_rate
        Prompt tokens found in prefix caches over all prompt tokens.
    """

    placed: list[int]
    most_waiting_beside_idle: int
    hit_rate: float
    seconds: float

    @property
    def imbalance(self) -> float:
        """How far the counts of requests lie apart, over their mean."""
        mean = sum(self.placed) / len(self.placed)
        return (max(self.placed) - min(self.placed)) / mean if mean else 0.0


def play(
    router: Router, trace: Sequence[Arrival], count: int, seats: int = 8, cache_blocks: int = 512
) -> ReplicaReport:
    """Play a trace to its end on `count` replicas."""
    replicas = [SimulatedReplica(engine, seats, cache_blocks) for engine in range(count)]
    pending, now_s, beside_idle, news_s = deque(trace), 0.0, 0, 0.0
    while pending or any(one.running or one.waiting for one in replicas):
        while pending and pending[0].at_s <= now_s:
            arrival = pending.popleft()
            loads = [one.load for one in replicas]
            replicas[router.place(RoutedRequest(arrival.prompt), loads)].add(arrival)
        for one in replicas:
            one.cancel(now_s)
            one.step()
        if any(not one.running and not one.waiting for one in replicas):
            beside_idle = max(beside_idle, *(len(one.waiting) for one in replicas))
        if now_s >= news_s:
            news_s = now_s + SimulatedReplica.NEWS_S
            for one in replicas:
                one.tell()
        now_s += SimulatedReplica.STEP_S
    queried = sum(one.queried for one in replicas)
    hit_rate = sum(one.found for one in replicas) / queried if queried else 0.0
    return ReplicaReport([one.placed for one in replicas], beside_idle, hit_rate, now_s)


def _is_gone(live: _Live, now_s: float) -> bool:
    return live.arrival.leaves_at_s is not None and live.arrival.leaves_at_s <= now_s
