"""Drafts change how many steps it takes, never which tokens come out."""

from __future__ import annotations

import pytest

from conch.api import SamplingParams
from support.tiny import tiny_checkpoint
from support.worker_driver import Driver, Job, build_worker

SETTINGS = [
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(temperature=0.0, max_tokens=24, repetition_penalty=1.3, logprobs=2),
    SamplingParams(temperature=1.0, max_tokens=24, logprobs=0),
    SamplingParams(temperature=1.5, max_tokens=24, top_k=20, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(temperature=0.8, max_tokens=24, top_p=0.8, logit_bias={5: 100.0}, min_tokens=8),
]


class Scripted:
    """Knows the answers, and guesses them right or wrong as told."""

    def __init__(self, answers, width, wrong_at=None):
        self.answers, self.width, self.wrong_at = answers, width, wrong_at
        self.forgotten = []

    def propose(self, context):
        drafts = []
        for request_id, tokens, room in zip(
            context.request_ids, context.token_ids, context.room, strict=True
        ):
            answer = self.answers.get(request_id, [])
            guess = answer[len(tokens) : len(tokens) + min(self.width, room)]
            if self.wrong_at is not None and len(guess) > self.wrong_at:
                guess = [
                    *guess[: self.wrong_at],
                    (guess[self.wrong_at] + 1) % 320,
                    *guess[self.wrong_at + 1 :],
                ]
            drafts.append(tuple(guess))
        return drafts

    def forget(self, request_ids):
        self.forgotten += request_ids


def jobs():
    return [Job(i + 1, [7 + i, 50, 60 + i, 9], params, seed=10 + i) for i, params in enumerate(SETTINGS)]


@pytest.mark.parametrize(("width", "wrong_at"), [(1, None), (5, None), (3, 0), (5, 2), (8, None)])
def test_the_same_tokens_with_any_drafter(width, wrong_at):
    folder = tiny_checkpoint("llama")
    plain = jobs()
    Driver(build_worker(folder)).run(plain)
    drafter = Scripted({job.id: job.tokens for job in plain}, width, wrong_at)
    drafted = jobs()
    driver = Driver(build_worker(folder, drafter=drafter))
    driver.run(drafted, stagger=2)
    assert (driver.accepted > 0) == (wrong_at != 0)
    for one, other in zip(plain, drafted, strict=True):
        assert other.output == one.output
        assert [entry.token_id for entry in other.logprobs] == [entry.token_id for entry in one.logprobs]
        for left, right in zip(one.logprobs, other.logprobs, strict=True):
            assert right.logprob == pytest.approx(left.logprob, abs=1e-4)
            assert right.rank == left.rank and len(right.top) == len(left.top)
    assert any(entry.logprob < -0.01 for job in drafted for entry in job.logprobs)
    assert 1 in drafter.forgotten


def test_seeds_and_preemption_do_not_change_draws():
    folder = tiny_checkpoint("llama")
    alone = jobs()
    for job in alone:
        Driver(build_worker(folder)).run([job])
    together = jobs()
    driver = Driver(build_worker(folder))
    for _ in range(5):
        driver.step(together, 100)
    driver.preempt(together[2])
    driver.preempt(together[3])
    driver.step([job for job in together if job.id not in (3, 4)], 100)
    driver.run(together, chunk=3)
    assert [job.output for job in together] == [job.output for job in alone]
