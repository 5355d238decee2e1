"""Plays a planning trace on a host side and says what its steps cost; the same for ours and for vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median
from typing import Any, Protocol

from planning_trace import Job, PlanningTrace

SETTLING_STEPS = 16


@dataclass(frozen=True)
class Run:
    """One step.

    Attributes
    ----------
    seconds
        Spent by the host side; what stands for the model is not in it.
    tokens, ended
        New tokens, and requests that ended.
    """

    seconds: float
    tokens: int
    ended: int


class Host(Protocol):
    """A scheduler with all that belongs to it."""

    def prepare(self, job: Job) -> Any:  # noqa: ANN401 - the host's own
        """Return what arrives for a job; not timed."""

    def step(self, arrivals: list[Any]) -> Run:
        """Take in what arrived and do one step."""

    def clear(self) -> None:
        """End all requests."""

    def counts(self) -> dict[str, int]:
        """Return counters that show what was served."""


def answer(host: Host, question: dict[str, Any]) -> dict[str, Any]:
    """Answer ``{"fill": BLOCKS}`` or ``{"rows", "cached_blocks", "decode_steps", "churn_steps"}``."""
    if "fill" in question:
        fill(host, PlanningTrace(0, question["fill"], 0))
        return host.counts()
    trace = PlanningTrace(question["rows"], question["cached_blocks"], question["decode_steps"])
    before = host.counts()
    decode, churn = play(host, trace, question["churn_steps"])
    after = host.counts()
    return {
        "decode_us_per_row": spread(decode, trace.rows),
        "churn_us_per_row": spread(churn, trace.rows),
        "churn_ended": sum(run.ended for run in churn),
        "counts": {key: after[key] - before[key] for key in ("hit_tokens", "preemptions")},
    }


def fill(host: Host, trace: PlanningTrace) -> None:
    """Serve the documents, a few at a time."""
    documents, ended = trace.documents(), 0
    waiting = [host.prepare(job) for job in documents]
    while ended < len(documents):
        arrivals, waiting = waiting[:8], waiting[8:]
        ended += host.step(arrivals).ended


def play(host: Host, trace: PlanningTrace, churn_steps: int) -> tuple[list[Run], list[Run]]:
    """Return the steps in which all decode, and those in which requests end and come."""
    run = host.step([host.prepare(job) for job in trace.first()])
    settling = SETTLING_STEPS
    while run.tokens < trace.rows or settling:  # until all prompts are computed
        if run.ended:
            raise RuntimeError("requests ended before all decoded: decode_steps is too small for the prompts")
        settling -= run.tokens == trace.rows
        run = host.step([])
    decode = []
    while not run.ended:
        decode.append(run)
        run = host.step([])
    later, churn = trace.later(), []
    for _ in range(churn_steps):
        run = host.step([host.prepare(next(later)) for _ in range(run.ended)])
        churn.append(run)
    host.clear()
    return decode, churn


def spread(runs: list[Run], rows: int) -> dict[str, float]:
    """Return median, mean and worst microseconds a row."""
    each = [1e6 * run.seconds / rows for run in runs]
    return {
        "median": round(median(each), 3),
        "mean": round(mean(each), 3),
        "worst": round(max(each), 3),
        "steps": len(each),
    }
