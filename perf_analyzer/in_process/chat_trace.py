"""Chats of several turns that share system prompts; the same seed gives the same. Imports nobody's engine.

A turn's prompt is the whole chat so far: system prompt, what the user and the model have said, and what the
user says now. So it is known but for its end, and the first turn of a chat shares its system prompt with
others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

VOCAB = 32_000
SYSTEM_PROMPTS = 8
SYSTEM_TOKENS = (150, 1_200)
USER_TOKENS = (20, 200)
ANSWER_TOKENS = (30, 200)
MOST_TURNS = 8
MOST_THINKING_STEPS = 60


@dataclass(frozen=True)
class Turn:
    """What the user says, how long the answer is, and for how many steps the user thinks before."""

    user_tokens: tuple[int, ...]
    answer_tokens: int
    thinking_steps: int


@dataclass(frozen=True)
class Chat:
    """One conversation."""

    system_tokens: tuple[int, ...]
    turns: tuple[Turn, ...]


def chats(count: int, seed: int) -> list[Chat]:
    """Return `count` chats; some system prompts are far more popular than others."""
    draw = random.Random(f"chats {seed}")
    systems = [_tokens(draw, draw.randint(*SYSTEM_TOKENS)) for _ in range(SYSTEM_PROMPTS)]
    popularity = [1 / (rank + 1) for rank in range(SYSTEM_PROMPTS)]
    return [
        Chat(
            draw.choices(systems, popularity)[0],
            tuple(_turn(draw) for _ in range(draw.randint(1, MOST_TURNS))),
        )
        for _ in range(count)
    ]


def _turn(draw: random.Random) -> Turn:
    user = _tokens(draw, draw.randint(*USER_TOKENS))
    return Turn(user, draw.randint(*ANSWER_TOKENS), draw.randint(0, MOST_THINKING_STEPS))


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.choices(range(2, VOCAB), k=count))
