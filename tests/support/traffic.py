"""Requests of many lengths, some of which share a beginning, sent a few at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence

from conch.api import SamplingParams
from conch.engine.local import LocalEngine


def mixed_prompts(rng: random.Random, count: int, longest: int, vocab: int) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens, log-uniform in length; every second goes on like the one before."""
    prompts: list[list[int]] = []
    for index in range(count):
        own = [rng.randrange(vocab) for _ in range(round(longest ** rng.random()))]
        before = prompts[-1] if index % 2 else []
        prompts.append([*before, *own][:longest])
    prompts[0] = [rng.randrange(vocab) for _ in range(longest)]
    return prompts


def staggered(
    engine: LocalEngine, prompts: Sequence[Sequence[int]], budgets: Sequence[int], at_once: int
) -> list[tuple[int, ...]]:
    """Serve greedily with at most `at_once` alive; two join in each step until then."""
    queue = list(enumerate(zip(prompts, budgets, strict=True)))[::-1]
    index_of: dict[int, int] = {}
    answers: list[list[int]] = [[] for _ in prompts]
    alive = 0
    while queue or engine.has_work:
        for _ in range(min(2, at_once - alive, len(queue))):
            index, (prompt, budget) = queue.pop()
            params = SamplingParams(temperature=0.0, max_tokens=budget, ignore_eos=True)
            index_of[engine.add(prompt, params)] = index
            alive += 1
        for output in engine.step():
            assert output.failure is None, output.failure
            answers[index_of[output.request_id]] += output.token_ids
            alive -= output.finish_reason is not None
    return [tuple(answer) for answer in answers]
