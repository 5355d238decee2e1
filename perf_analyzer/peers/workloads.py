"""The work that every engine is given: token ids, so that no tokenizer and no template is in the way.

All outputs have a fixed length: greedy, nothing stops early. The prompts of a round differ from those of
every other, so that a prefix cache helps where it is meant to (W4) and nowhere else.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

Prompt = list[int]

# Ids that are ordinary words or pieces of words in byte-level BPE vocabularies; no special tokens.
_FIRST_ID, _END_ID = 1_000, 30_000
_COPIED_TOKENS, _COPIES = 48, 8


@dataclass(frozen=True)
class Work:
    """Prompts served at once, each for exactly `max_tokens`; `before` is served first, untimed, alone."""

    prompts: tuple[Prompt, ...]
    max_tokens: int
    before: tuple[Prompt, ...] = ()

    def question(self) -> dict[str, object]:
        """Return what is sent to an engine's program."""
        return {"prompts": self.prompts, "max_tokens": self.max_tokens}

    def preparation(self) -> dict[str, object] | None:
        """Return what is sent first, if anything."""
        return {"prompts": self.before, "max_tokens": 1} if self.before else None


@dataclass(frozen=True)
class Answer:
    """What an engine's program said: the wall time, when the first token came, and the tokens.

    Attributes
    ----------
    first_s
        Until the first token of any request; None where the engine tells only whole outputs.
    token_ids
        Of each request in the order of the prompts.
    """

    seconds: float
    first_s: float | None
    token_ids: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(map(len, self.token_ids))


@dataclass(frozen=True)
class Workload:
    """One kind of work and the figure that it gives.

    Attributes
    ----------
    unit
        Of the figure.
    smaller_is_better
        Whether the figure is a time.
    timeout_s
        For one answer; several times what the slowest engine seen takes.
    """

    key: str
    title: str
    unit: str
    timeout_s: float
    smaller_is_better: bool = False

    def work(self, round_number: int, quick: bool = False) -> Work:
        """Return the work of one round; the same arguments give the same work."""
        draw = random.Random(f"{self.key}/{round_number}")
        return _MAKERS[self.key](draw, 8 if quick else 1)

    def figure(self, work: Work, answer: Answer) -> float:
        """Return the figure of one answer.

        Raises
        ------
        ValueError
            The engine made more or fewer tokens than were asked for: it did other work.
        """
        made = [len(ids) for ids in answer.token_ids]
        if made != [work.max_tokens] * len(work.prompts):
            raise ValueError(f"{self.key}: {made} tokens were made instead of {work.max_tokens} each")
        if self.key == "w3":
            return sum(map(len, work.prompts)) / answer.seconds
        if self.key == "w4":
            return answer.seconds
        if self.key in ("w1", "w5") and answer.first_s is not None:
            return (work.max_tokens - 1) / (answer.seconds - answer.first_s)
        return answer.num_tokens / answer.seconds


WORKLOADS = (
    Workload("w1", "one stream, prompt 128, output 128", "tok/s after the first", timeout_s=60),
    Workload("w2", "32 requests at once, prompts 32-512, output 128", "output tok/s", timeout_s=180),
    Workload("w3", "one prompt of 2,048, output 1", "prompt tok/s", timeout_s=60),
    Workload("w4", "32 requests, 1,024 tokens shared and cached", "s", timeout_s=120, smaller_is_better=True),
    Workload("w5", "one stream that copies text, output 128", "tok/s after the first", timeout_s=60),
)
BY_KEY = {workload.key: workload for workload in WORKLOADS}


def tokens(draw: random.Random, count: int) -> Prompt:
    """Return `count` token ids."""
    return [draw.randrange(_FIRST_ID, _END_ID) for _ in range(count)]


def _one_stream(draw: random.Random, shrink: int) -> Work:
    return Work((tokens(draw, 128),), 128 // shrink)


def _crowd(draw: random.Random, shrink: int) -> Work:
    # Lengths are spread evenly, in random order: the amount of work is the same in every round.
    lengths = [32 + 480 * index // 31 for index in range(32)]
    draw.shuffle(lengths)
    return Work(tuple(tokens(draw, length) for length in lengths[:: min(shrink, 4)]), 128 // shrink)


def _long_prompt(draw: random.Random, shrink: int) -> Work:
    return Work((tokens(draw, 2048 // shrink),), 1)


def _shared_prefix(draw: random.Random, shrink: int) -> Work:
    shared = tokens(draw, 1024)
    prompts = tuple(shared + tokens(draw, 32) for _ in range(32 // min(shrink, 4)))
    return Work(prompts, 32 // min(shrink, 4), before=(shared + tokens(draw, 32),))


def _copying(draw: random.Random, shrink: int) -> Work:
    passage = tokens(draw, _COPIED_TOKENS)
    return Work((passage * _COPIES,), 128 // shrink)


_MAKERS = {"w1": _one_stream, "w2": _crowd, "w3": _long_prompt, "w4": _shared_prefix, "w5": _copying}


def agreement(mine: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Return how far outputs agree: the median share of tokens before the first that differs."""
    shares = []
    for left, right in zip(mine, theirs, strict=True):
        differing = [index for index, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]]
        shares.append(differing[0] / len(left) if differing else 1.0)
    return median(shares)
