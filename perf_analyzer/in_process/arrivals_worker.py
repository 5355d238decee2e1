"""Requests that arrive at given times, on a simulated engine or on a real one; says when each was served.

Options: ``{"settings": {... model.json ...}, "law": {"step_s", "token_s"}}``. With a law there is no model:
a step takes ``step_s + token_s * tokens`` seconds of a clock that stands still otherwise. With null for a
law the engine and the clock are real. Question: ``{"arrivals": [{"at_s", "prompt", "output", "tenant",
"ttft_target_s", "tpot_target_s"}]}``, lengths in tokens, times from the beginning. The answer holds for each
its `ttft_s` and `tpot_s`, and `ledger`: for each step by which it changed, the tokens served to each tenant
so far and whether it had requests waiting.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lines import serve
from simulated_clock import RealClock, SimulatedClock

VOCAB = 32_000


class Clock(Protocol):
    """What arrivals are timed by."""

    def now(self) -> float:
        """Return seconds."""

    def wait_until(self, at_s: float) -> None:
        """Let time pass."""


class Serving(Protocol):
    """What serves them."""

    @property
    def has_work(self) -> bool:
        """Whether a step would bring anything."""

    def add(self, message: Any) -> None:  # noqa: ANN401 - the engine's own
        """Take a request in."""

    def step(self) -> list[Any]:
        """Take a step; returns its news."""


@dataclass(frozen=True)
class Arrival:
    """One request to come."""

    at_s: float
    prompt: int
    output: int
    tenant: str
    ttft_target_s: float | None
    tpot_target_s: float | None


class Ledger:
    """Tokens served to each tenant: a prompt when it is first admitted, each further token when it comes.

    Parameters
    ----------
    tenants
        Whose a request is, by the engine's id of it.
    """

    def __init__(self, tenants: dict[int, str]) -> None:
        self._tenants = tenants
        self._seen: set[int] = set()
        self.prompt: Counter[str] = Counter()
        self.output: Counter[str] = Counter()
        self.admitted: Counter[str] = Counter()

    def see(self, plan: Any) -> None:  # noqa: ANN401 - a StepPlan; the engine is imported later
        """Take note of a step."""
        for admission in plan.admitted:
            if admission.request_id not in self._seen:
                self._seen.add(admission.request_id)
                tenant = self._tenants[admission.request_id]
                self.prompt[tenant] += admission.num_prompt
                self.admitted[tenant] += 1
        for row in plan.rows:
            self.output[self._tenants[row.request_id]] += row.samples


class Player:
    """Plays arrivals on an engine.

    Parameters
    ----------
    make
        From a number and an arrival to what `engine.add` takes.
    """

    def __init__(
        self, engine: Serving, clock: Clock, make: Callable[[int, Arrival], Any], ledger: Ledger
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._make = make
        self._ledger = ledger
        self._usages: dict[int, Any] = {}
        self._lines: list[dict[str, Any]] = []

    def play(self, arrivals: list[Arrival], first_id: int) -> dict[str, Any]:
        """Play to the end."""
        begin = self._clock.now() + 0.01
        coming = sorted(enumerate(arrivals, start=first_id), key=lambda entry: entry[1].at_s)
        came: Counter[str] = Counter()
        position = 0
        while position < len(coming) or self._engine.has_work:
            if not self._engine.has_work:
                self._clock.wait_until(begin + coming[position][1].at_s)
            while position < len(coming) and begin + coming[position][1].at_s <= self._clock.now():
                number, arrival = coming[position]
                self._engine.add(self._make(number, arrival))
                came[arrival.tenant] += 1
                position += 1
            self._hear(self._engine.step())
            self._note(came)
        served = [self._times(self._usages[number]) for number in range(first_id, first_id + len(arrivals))]
        return {"served": served, "ledger": self._lines, "seconds": self._clock.now() - begin}

    def _hear(self, outputs: list[Any]) -> None:
        for output in outputs:
            if output.failure is not None:
                raise RuntimeError(f"a request failed: {output.failure.message}")
            if output.usage is not None:
                self._usages[output.request_id] = output.usage

    def _note(self, came: Counter[str]) -> None:
        ledger = self._ledger
        self._lines.append(
            {
                tenant: [ledger.prompt[tenant], ledger.output[tenant], came[tenant] - ledger.admitted[tenant]]
                for tenant in came
            }
        )

    @staticmethod
    def _times(usage: Any) -> dict[str, float | None]:  # noqa: ANN401
        later = usage.num_output - 1
        tpot_s = (usage.total_s - usage.ttft_s) / later if later else None
        return {"ttft_s": usage.ttft_s, "tpot_s": tpot_s}


def prompt_of(number: int, length: int) -> tuple[int, ...]:
    """Return a prompt that no other request begins with."""
    draw = random.Random(f"arrival {number}")
    return tuple(draw.choices(range(2, VOCAB), k=length))


def build(settings: dict[str, Any], law: dict[str, float] | None, ledger: Ledger) -> tuple[Any, Clock]:
    """Return an engine and what it is timed by. The clock goes first: the engine is imported after it."""
    if law is None:
        return build_real(settings), RealClock()
    clock = SimulatedClock().install()
    step_s, token_s = law["step_s"], law["token_s"]
    from modelless import build_modelless

    def on_step(plan: Any) -> None:  # noqa: ANN401
        ledger.see(plan)
        clock.advance(step_s + token_s * plan.num_tokens)

    return build_modelless(settings, on_step)[0], clock


def build_real(settings: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return an engine with a model."""
    from conch.api.config import parse_config
    from conch.api.model_reference import resolve_model_reference
    from conch.engine.build import build_engine

    config = parse_config({**settings, "model": resolve_model_reference(settings["model"])})
    return build_engine(config, lambda stage, fraction: None).engine


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Build the engine."""
    tenants: dict[int, str] = {}
    ledger = Ledger(tenants)
    engine, clock = build(options["settings"], options["law"], ledger)
    from conch.api.sampling import SamplingParams
    from conch.engine.protocol import AddRequest

    engine_ids = itertools.count(1)

    def make(number: int, arrival: Arrival) -> AddRequest:
        tenants[next(engine_ids)] = arrival.tenant
        return AddRequest(
            request_id=number,
            token_ids=prompt_of(number, arrival.prompt),
            params=SamplingParams(temperature=0.0, max_tokens=arrival.output, ignore_eos=True),
            tenant=arrival.tenant,
            ttft_target_s=arrival.ttft_target_s,
            tpot_target_s=arrival.tpot_target_s,
        )

    first_ids = itertools.count(1, 1_000_000)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        arrivals = [Arrival(**entry) for entry in question["arrivals"]]
        answered = Player(engine, clock, make, ledger).play(arrivals, next(first_ids))
        return {**answered, "preemptions": engine.stats().preemptions}

    return {}, answer


if __name__ == "__main__":
    serve(start)
