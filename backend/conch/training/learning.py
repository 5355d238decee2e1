"""Teaches a head what the target says next."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from conch.training.head import TrainableHead
from conch.training.states import Lesson, Target

_WARM_UP = 0.03
_CLIP = 0.5
_FADING = 0.8
_STAGE = 0.3
"""Share of the time after which one more draft in a row is trained: the first ones cost least to learn."""


@dataclass(frozen=True, slots=True)
class Course:
    """How long and how fast a head learns.

    Attributes
    ----------
    minutes
        With all threads at work: time that the process is kept from its cores does not count.
    depth
        Drafts in a row that are trained in the end; one more from stage to stage.
    rate
        Largest learning rate of Adam.
    tokens_at_once
        In a step, about.
    seed
        Of the order of lessons.
    """

    minutes: float
    depth: int = 3
    rate: float = 1e-3
    tokens_at_once: int = 1500
    seed: int = 1


class Teacher:
    """Trains a head, and examines it.

    Parameters
    ----------
    head
        To be trained.
    target
        Knows what is right.
    drafted : int64 [D]
        Tokens that the head can draft.
    """

    def __init__(self, head: TrainableHead, target: Target, drafted: torch.Tensor) -> None:
        self._head, self._target = head, target
        self._rows = target.head[drafted].contiguous()
        self._drafted = drafted

    def teach(
        self, lessons: Sequence[Lesson], course: Course, progress: Callable[[float, float], None]
    ) -> int:
        """Train until time is up; `progress` is told the share of it, and the loss. Returns steps done."""
        parameters = list(self._head.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=course.rate, betas=(0.9, 0.95), weight_decay=0.0)
        budget_s = 60 * course.minutes * torch.get_num_threads()
        began_s, loss_mean, steps = time.process_time(), math.nan, 0
        for batch in _batches(lessons, course):
            share = (time.process_time() - began_s) / budget_s
            if share >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = course.rate * _rate_at(share)
            loss = self._loss(batch, min(course.depth, 1 + int(share / _STAGE)))
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward([loss])
            torch.nn.utils.clip_grad_norm_(parameters, _CLIP)
            optimizer.step()
            loss_mean = loss.item() if steps == 0 else 0.97 * loss_mean + 0.03 * loss.item()
            steps += 1
            progress(share, loss_mean)
        return steps

    def examine(self, lessons: Sequence[Lesson], depth: int) -> list[float]:
        """Return, for 1 to `depth` drafts, in what share of steps all are what the target has written.

        Steps as decoding would take them: each begins after what the one before has brought.
        """
        hits, steps = [0] * depth, 0
        for lesson in lessons:
            runs = self._runs(lesson, depth)
            slot = _first_slot(lesson)
            while slot < len(runs):
                steps += 1
                for ahead in range(runs[slot]):
                    hits[ahead] += 1
                slot += 1 + runs[slot]
        return [count / max(1, steps) for count in hits]

    def _runs(self, lesson: Lesson, depth: int) -> list[int]:
        """Return how many drafts from each slot on are right before the first that is wrong."""
        tokens = lesson.token_ids
        right = torch.ones(len(tokens) - 2, dtype=torch.bool)
        runs = torch.zeros(len(tokens) - 2, dtype=torch.long)
        with torch.inference_mode():
            for ahead, outputs in enumerate(self._outputs(lesson.states[None], tokens[None], depth)):
                logits = outputs[0] @ self._rows.T
                if ahead:  # this depth goes on with drafts that were right up to the slot before
                    right = functional.pad(right, (1, 0))[:-1]
                right = right & (self._drafted[logits.argmax(-1)] == tokens[2:])
                runs[: max(0, len(runs) - ahead)] += right[ahead:]
        found: list[int] = runs.tolist()
        return found

    def _loss(self, batch: Sequence[Lesson], depth: int) -> torch.Tensor:
        """Return how far the head's answers are from the target's own, where the target has written."""
        width = max(len(lesson.token_ids) for lesson in batch)
        tokens = torch.stack([_padded(lesson.token_ids, width) for lesson in batch])
        states = torch.stack([_padded(lesson.states, width) for lesson in batch])
        which = torch.zeros(len(batch), width - 2, dtype=torch.bool)
        for row, lesson in enumerate(batch):
            which[row, max(_first_slot(lesson), depth - 1) : len(lesson.token_ids) - 2] = True
        with torch.no_grad():
            last = states[:, 1:-1, -self._head.shape.hidden :][which]
            wanted = (self._target.last_norm(last) @ self._rows.T).float().softmax(-1)
        total = torch.zeros(())
        for index, outputs in enumerate(self._outputs(states, tokens, depth)):
            told = (outputs[which] @ self._rows.T).float().log_softmax(-1)
            total = total - _FADING**index * (wanted * told).sum(-1).mean()
        return total

    def _outputs(self, states: torch.Tensor, tokens: torch.Tensor, depth: int) -> Iterator[torch.Tensor]:
        """Yield what the logits of each depth are made of, [B, S - 2, h]: at slot i, for token i + 2."""
        with torch.autocast("cpu", torch.bfloat16):
            unrolling = self._head.begin(states[:, :-2])
            embedded = functional.embedding(tokens[:, 1:-1], self._target.embedding)
            for _ in range(depth):
                yield unrolling.next(embedded)


def _first_slot(lesson: Lesson) -> int:
    """Return the slot that says what the target's second token is: the first is sampled without a draft."""
    return max(0, lesson.num_prompt - 1)


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    return functional.pad(x, (0,) * (2 * x.dim() - 1) + (width - len(x),))


def _rate_at(share: float) -> float:
    """Rise, then fall along a cosine."""
    return min(share / _WARM_UP, 0.5 + 0.5 * math.cos(math.pi * min(1.0, share))) + 0.01


def _batches(lessons: Sequence[Lesson], course: Course) -> Iterator[list[Lesson]]:
    """Yield lessons of like lengths, in ever new order."""
    rng = random.Random(course.seed)
    ordered = sorted(lessons, key=lambda lesson: len(lesson.token_ids))
    groups: list[list[Lesson]] = [[]]
    for lesson in ordered:
        if groups[-1] and (len(groups[-1]) + 1) * len(lesson.token_ids) > course.tokens_at_once:
            groups.append([])
        groups[-1].append(lesson)
    while True:
        yield from rng.sample(groups, len(groups))
