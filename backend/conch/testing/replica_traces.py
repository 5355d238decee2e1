"""Traces of requests to place on replicas: what has been seen to pile up on few of them."""

from __future__ import annotations

import random

from conch.testing.replicas import Arrival

REQUESTS = 200


def equal(interval_s: float = 0.02) -> list[Arrival]:
    """Return requests that are all alike, each with a prompt of its own."""
    return [Arrival(number * interval_s, _own_prompt(number), 20) for number in range(REQUESTS)]


def every_fourth_long() -> list[Arrival]:
    """Return requests of which every fourth takes twenty times as long: in step with the replicas."""
    return [
        Arrival(number * 0.05, _own_prompt(number), 200 if number % 4 == 0 else 10)
        for number in range(REQUESTS)
    ]


def burst_after_idling() -> list[Arrival]:
    """Return one request, nothing for a minute, and then all at the same moment."""
    return [Arrival(0.0, _own_prompt(0), 20)] + [
        Arrival(60.0, _own_prompt(number), 20) for number in range(1, REQUESTS)
    ]


def cancelled_together() -> tuple[list[Arrival], list[Arrival]]:
    """Return requests whose clients all leave at the same moment, and those that come right after."""
    leaving = [Arrival(0.0, _own_prompt(number), 500, leaves_at_s=1.0) for number in range(100)]
    after = [Arrival(1.0, _own_prompt(1000 + number), 20) for number in range(100)]
    return leaving, after


def shared_prompts(groups: int = 12, requests: int = 600, seed: int = 1) -> list[Arrival]:
    """Return questions behind system prompts, some of which are far more popular than others."""
    draw = random.Random(f"shared prompts {seed}")
    systems = [tuple(draw.choices(range(1000), k=draw.randint(300, 1500))) for _ in range(groups)]
    popularity = [1 / (rank + 1) for rank in range(groups)]
    at_s, trace = 0.0, []
    for _ in range(requests):
        at_s += draw.expovariate(1 / 0.05)
        (system,) = draw.choices(systems, popularity)
        question = tuple(draw.choices(range(1000), k=draw.randint(20, 120)))
        trace.append(Arrival(at_s, (*system, *question), draw.randint(10, 60)))
    return trace


def _own_prompt(number: int) -> tuple[int, ...]:
    return (number,) * 40
