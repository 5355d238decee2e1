"""An engine under test, the truth about its model, and what must hold of every answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from conch.api import SamplingParams
from conch.api.steps import FinishReason, RequestOutput
from conch.engine.local import LocalEngine
from support.combinations import BUDGET, CERTAIN, Cell
from support.oracle import Oracle, Same

KINDS = 3
"""Tenants, each with a priority of its own."""


@dataclass(frozen=True)
class Job:
    """One request."""

    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def is_plain(self) -> bool:
        """Whether transformers' likeliest tokens are the answer."""
        return self.params == greedy(self.params.max_tokens)


@dataclass(frozen=True)
class Answer:
    """What a request got."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None
    failure: str | None
    num_cached: int
    num_preemptions: int

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> Answer:
        last = outputs[-1]
        return cls(
            token_ids=tuple(token for output in outputs for token in output.token_ids),
            logprobs=tuple(entry.logprob for output in outputs for entry in output.logprobs or ()),
            finish_reason=last.finish_reason,
            failure=last.failure.message if last.failure else None,
            num_cached=last.usage.num_cached if last.usage else 0,
            num_preemptions=last.usage.num_preemptions if last.usage else 0,
        )


def greedy(count: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **more)


def draw(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, 320) for _ in range(length))


class Truth:
    """What each job is answered alone by a plain engine, and by transformers; asked once."""

    def __init__(self, plain: LocalEngine, oracle: Oracle) -> None:
        self._plain = plain
        self.oracle = oracle
        self._alone: dict[str, Answer] = {}

    def alone(self, job: Job) -> Answer:
        key = repr(job)
        if key not in self._alone:
            self._alone[key] = Answer.of(list(self._plain.stream(job.prompt, job.params)))
        return self._alone[key]


class Stand:
    """The engine of a cell while it serves one scenario."""

    def __init__(self, cell: Cell, engine: LocalEngine, truth: Truth) -> None:
        assert not engine.has_work, "the scenario before has left something"
        self.cell = cell
        self.engine = engine
        self.truth = truth
        self.most_waiting = 0
        self._before = engine.stats()

    def assert_drained(self) -> None:
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.kv_tokens_used) == (0, 0, 0)
        assert (stats.kv_blocks_used, stats.kv_blocks_parked) == (0, 0)

    def rise(self, counter: str) -> int:
        """Return by how much a counter has risen in this scenario."""
        return getattr(self.engine.stats(), counter) - getattr(self._before, counter)

    def step(self) -> list[RequestOutput]:
        """Take a step, which never computes more than the budget."""
        computed = self.engine.stats().computed_tokens
        news = self.engine.step()
        stats = self.engine.stats()
        assert stats.computed_tokens - computed <= BUDGET
        self.most_waiting = max(self.most_waiting, stats.waiting)
        return news

    def serve(self, jobs: Sequence[Job], joins: Sequence[int] | None = None) -> list[Answer]:
        """Serve jobs, of several tenants and priorities; the i-th joins at step ``joins[i]``."""
        waiting = sorted(zip(joins or [0] * len(jobs), range(len(jobs)), strict=True), reverse=True)
        index_of: dict[int, int] = {}
        news: dict[int, list[RequestOutput]] = {}
        step = 0
        while waiting or self.engine.has_work:
            while waiting and waiting[-1][0] <= step:
                index = waiting.pop()[1]
                index_of[self.add(jobs[index], index)] = index
            for output in self.step():
                news.setdefault(index_of[output.request_id], []).append(output)
            step += 1
        return [Answer.of(news[index]) for index in range(len(jobs))]

    def add(self, job: Job, number: int = 0) -> int:
        kind = number % KINDS
        return self.engine.add(job.prompt, job.params, priority=kind, tenant=f"tenant {kind}")

    def check(self, jobs: Sequence[Job], answers: Sequence[Answer]) -> None:
        """Fail unless each answer is the truth.

        Where drafts are drawn, a sampled answer depends on how many there were: its law is tested elsewhere.
        """
        same = Same(self.truth.oracle)
        for job, answer in zip(jobs, answers, strict=True):
            assert answer.failure is None, answer.failure
            if job.is_plain:
                assert len(answer.token_ids) == job.params.max_tokens
                same.check(list(job.prompt), list(answer.token_ids))
            elif job.params.is_greedy or self.cell.drafter in CERTAIN:
                self._check_alone(job, answer)
            else:
                assert answer.finish_reason is FinishReason.LENGTH
                assert len(answer.token_ids) == job.params.max_tokens
        if same.positions:
            same.finish()

    def _check_alone(self, job: Job, answer: Answer) -> None:
        alone = self.truth.alone(job)
        assert answer.token_ids == alone.token_ids, job.params
        assert answer.finish_reason is alone.finish_reason
        assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-3)
