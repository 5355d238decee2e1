"""Rounds: each workload by each engine in turn, so that what drifts on the machine drifts for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from peers import venvs
from peers.engines import OURS, WEIGHTS, Engine
from peers.limits import Rates
from peers.process import Program, ProgramError
from peers.weights import Models
from peers.workloads import BY_KEY, Answer, Work, Workload, agreement

_FIRST_QUESTION = {"prompts": [list(range(1000, 1016))], "max_tokens": 1}
_FIRST_TIMEOUT_S = 60.0
_WARM_UP = ("w2", "w3")


@dataclass
class Seen:
    """What was measured of one engine; filled by `Rounds`.

    Attributes
    ----------
    figures
        By workload, one for each round, in the workload's unit.
    first_s
        By workload, the time to the first token of each round.
    startup_s
        From starting the process to the first token of a prompt of 16, of each start.
    agreement
        By workload, the share of tokens that are the same as ours of the same weights, of each round.
    """

    figures: dict[str, list[float]] = field(default_factory=dict)
    first_s: dict[str, list[float]] = field(default_factory=dict)
    startup_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    ready: dict[str, object] = field(default_factory=dict)
    agreement: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    engines: tuple[Engine, ...]
    workloads: tuple[Workload, ...]
    rounds: int
    quick: bool = False

    def engines_of(self, weights: str) -> list[Engine]:
        """Return the engines of one kind of weights."""
        return [engine for engine in self.engines if engine.weights == weights]


class Rounds:
    """Runs a plan. Engines of the same kind of weights are in memory together; only one computes at a time.

    Parameters
    ----------
    say
        Called with a line for people.
    """

    def __init__(self, plan: Plan, models: Models, say: Callable[[str], None]) -> None:
        self.plan = plan
        self._models = models
        self._say = say
        self.seen: dict[str, Seen] = {engine.name: Seen() for engine in plan.engines}
        self.failures: dict[str, str] = {}
        self.rates: list[Rates] = []

    def run(self) -> None:
        """Measure all groups; an engine that fails is left out from then on."""
        with Program(Path(venvs.python_of(OURS)), "limits_worker.py", {}) as limits:
            self._measure_limits(limits)
            for weights in WEIGHTS:
                engines = self.plan.engines_of(weights)
                if engines:
                    self._run_group(engines, limits)

    def restart(self, engine: Engine, times: int) -> None:
        """Measure more starts of an engine, alone; one that failed is left alone."""
        for _ in range(times if engine in self.plan.engines and engine.name not in self.failures else 0):
            with ExitStack() as stack:
                self._start(engine, stack)

    def _run_group(self, engines: Sequence[Engine], limits: Program) -> None:
        with ExitStack() as stack:
            programs = {}
            for engine in engines:
                program = self._start(engine, stack)
                if program is not None and self._warm_up(engine, program):
                    programs[engine] = program
            for number in range(1, self.plan.rounds + 1):
                for workload in self.plan.workloads:
                    self._run_workload(workload, number, programs)
                self._measure_limits(limits)

    def _start(self, engine: Engine, stack: ExitStack) -> Program | None:
        options = {**engine.options, "model": self._models.paths.get(engine.model)}
        program = Program(
            venvs.python_of(engine.peer), engine.program, options, engine.variables, engine.start_timeout_s
        )
        try:
            stack.enter_context(program)
            program.ask(_FIRST_QUESTION, _FIRST_TIMEOUT_S)
        except (ProgramError, OSError) as error:
            self._fail(engine, "start", error)
            return None
        seen = self.seen[engine.name]
        seen.startup_s.append(time.perf_counter() - program.began_s)
        seen.ready = program.ready
        seen.peak_bytes = max(seen.peak_bytes, program.peak_bytes)
        self._say(f"{engine.name}: first token after {seen.startup_s[-1]:.1f} s")
        return program

    def _warm_up(self, engine: Engine, program: Program) -> bool:
        try:
            for key in _WARM_UP:
                workload = BY_KEY[key]
                program.ask(workload.work(0, quick=True).question(), 2 * workload.timeout_s)
        except ProgramError as error:
            self._fail(engine, "warm-up", error)
            return False
        return True

    def _run_workload(self, workload: Workload, number: int, programs: dict[Engine, Program]) -> None:
        work = workload.work(number, self.plan.quick)
        answers: dict[Engine, Answer] = {}
        for engine in rotated(list(programs), number):
            if not engine.does(workload.key, number):
                continue
            try:
                answer = ask(programs[engine], workload, work)
                figure = workload.figure(work, answer)
            except (ProgramError, ValueError) as error:
                self._fail(engine, workload.key, error)
                del programs[engine]
                continue
            answers[engine] = answer
            self._note(engine, workload, answer, figure, programs[engine])
        self._compare(workload, answers)

    def _note(
        self, engine: Engine, workload: Workload, answer: Answer, figure: float, program: Program
    ) -> None:
        seen = self.seen[engine.name]
        seen.figures.setdefault(workload.key, []).append(figure)
        if answer.first_s is not None:
            seen.first_s.setdefault(workload.key, []).append(answer.first_s)
        seen.peak_bytes = max(seen.peak_bytes, program.peak_bytes)
        self._say(f"{workload.key} {engine.name}: {figure:.4g} {workload.unit}")

    def _compare(self, workload: Workload, answers: dict[Engine, Answer]) -> None:
        mine = next((answer for engine, answer in answers.items() if engine.peer == OURS), None)
        for engine, answer in answers.items():
            if mine is not None and engine.peer != OURS:
                share = agreement(mine.token_ids, answer.token_ids)
                self.seen[engine.name].agreement.setdefault(workload.key, []).append(round(share, 3))

    def _measure_limits(self, limits: Program) -> None:
        self.rates.append(Rates(**limits.ask({}, timeout_s=60)))

    def _fail(self, engine: Engine, stage: str, error: Exception) -> None:
        self.failures[engine.name] = f"{stage}: {type(error).__name__}: {error}"
        self._say(f"{engine.name} failed at {stage}")


def ask(program: Program, workload: Workload, work: Work) -> Answer:
    """Give a program its work, what comes before it first."""
    preparation = work.preparation()
    if preparation is not None:
        program.ask(preparation, workload.timeout_s)
    answer = program.ask(work.question(), workload.timeout_s)
    ids = tuple(tuple(row) for row in answer["token_ids"])
    return Answer(answer["seconds"], answer["first_s"], ids)


def rotated(items: list[Engine], by: int) -> list[Engine]:
    """Return the items with another one first each round, so that none always follows the same one."""
    at = by % len(items) if items else 0
    return items[at:] + items[:at]
