"""A mixture of healthy, broken and abandoned requests, and the account of how each of them ended."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen.grpc_client import GenerateRequest
from loadgen.latency import Trace
from loadgen.prompts import prompt

SHARES = {"short": 70, "invalid": 10, "cancelled": 10, "over_context": 5, "empty": 5}
MUST_FAIL = frozenset({"invalid", "over_context"})
_INVALID: Sequence[dict[str, Any]] = (
    {"temperature": "hot"},
    {"top_p": 1.5},
    {"max_tokens": -1},
    {"n": 0},
    {"no_such_key": 1},
)


@dataclass(frozen=True)
class Drawn:
    """A request of the mixture.

    Attributes
    ----------
    leave_after
        Tokens after which the client leaves; None stays to the end.
    """

    kind: str
    request: GenerateRequest
    leave_after: int | None = None


def draws(seed: int, context_tokens: int) -> Iterator[Drawn]:
    """Yield requests for ever, the same ones for the same seed."""
    random_ = random.Random(seed)
    while True:
        (kind,) = random_.choices(list(SHARES), weights=list(SHARES.values()))
        yield _draw(kind, random_, context_tokens)


def _draw(kind: str, random_: random.Random, context_tokens: int) -> Drawn:
    seed = random_.randrange(1 << 30)
    healthy = {
        "max_tokens": random_.randint(4, 32),
        "temperature": random_.choice((0, 0.8)),
        "ignore_eos": True,
    }
    text = prompt(random_.randint(4, 64), seed)
    if kind == "invalid":
        return Drawn(kind, GenerateRequest(text, {**healthy, **random_.choice(_INVALID)}))
    if kind == "cancelled":
        return Drawn(kind, GenerateRequest(text, {**healthy, "max_tokens": 64}), random_.randint(1, 48))
    if kind == "over_context":
        return Drawn(kind, GenerateRequest(prompt(context_tokens + 256, seed), healthy))
    return Drawn(kind, GenerateRequest("" if kind == "empty" else text, healthy))


@dataclass
class Account:
    """How requests ended. Only `add` writes; one event loop, hence no lock.

    Attributes
    ----------
    violations
        What was wrong with how requests ended, and how often.
    tokens_by_second
        Tokens that arrived in each second since `began_s`.
    """

    began_s: float
    ended: Counter[str] = field(default_factory=Counter)
    missing_finals: int = 0
    surplus_finals: int = 0
    after_final: int = 0
    violations: Counter[str] = field(default_factory=Counter)
    tokens_by_second: Counter[int] = field(default_factory=Counter)

    def add(self, drawn: Drawn, trace: Trace) -> None:
        """Take a request that ended into account."""
        self.ended[f"{drawn.kind} {outcome(trace)}"] += 1
        for arrival in trace.arrivals:
            self.tokens_by_second[int(arrival.at_s - self.began_s)] += arrival.num_tokens
        self.missing_finals += trace.num_finals == 0 and not trace.cancelled
        self.surplus_finals += max(0, trace.num_finals - 1)
        self.after_final += trace.num_after_final
        for wrong in faults(drawn, trace):
            self.violations[f"{drawn.kind} ({outcome(trace)}): {wrong}"] += 1

    def tokens_per_s(self, from_s: int, to_s: int) -> float:
        """Return tokens a second over ``[from_s, to_s)``, seconds since the start."""
        return sum(self.tokens_by_second[second] for second in range(from_s, to_s)) / (to_s - from_s)


def outcome(trace: Trace) -> str:
    """Say in one word how a request ended."""
    if trace.cancelled:
        return "left"
    if trace.error is not None:
        return "failed"
    return trace.finish_reason or "unexplained"


def faults(drawn: Drawn, trace: Trace) -> list[str]:
    """Return what was wrong with the way in which a request ended; nothing where all was right."""
    found = []
    if trace.num_finals != 1 and not trace.cancelled:
        found.append(f"{trace.num_finals} final responses, error {trace.error!r}")
    if trace.num_after_final:
        found.append(f"{trace.num_after_final} responses after the final one")
    if drawn.kind in MUST_FAIL and outcome(trace) != "failed":
        found.append("it was to be refused")
    if drawn.kind == "short" and outcome(trace) != "length":
        found.append(f"it was to reach its length, but: {trace.error or outcome(trace)}")
    if drawn.kind == "short" and trace.num_tokens != drawn.request.sampling["max_tokens"]:
        found.append(f"{trace.num_tokens} tokens of {drawn.request.sampling['max_tokens']}")
    return found
