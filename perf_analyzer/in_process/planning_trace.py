"""What both schedulers are asked to plan: the same prompts, lengths and arrivals. Imports nobody's engine.

First documents are served and end, so that the prefix cache holds them. Then `rows` requests run, whose
prompts begin with a part of a document or with nothing known. For a while all only decode; after that they
end one after another, and each that ends is replaced.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

BLOCK_SIZE = 16
DOCUMENT_BLOCKS = 100
VOCAB = 32_000
OWN_TOKENS = (32, 512)
MOST_KNOWN_BLOCKS = 32
OUTPUT_TOKENS = (64, 192)


@dataclass(frozen=True)
class Job:
    """One request."""

    token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class PlanningTrace:
    """A trace.

    Attributes
    ----------
    rows
        Requests that run at once.
    cached_blocks
        Blocks that the prefix cache holds before they come.
    decode_steps
        Steps in which nothing but decoding happens.
    """

    rows: int
    cached_blocks: int
    decode_steps: int

    def documents(self) -> list[Job]:
        """Return requests that fill the prefix cache."""
        count = self.cached_blocks // DOCUMENT_BLOCKS
        return [Job(document(number, DOCUMENT_BLOCKS * BLOCK_SIZE), 1) for number in range(count)]

    def first(self) -> list[Job]:
        """Return the requests that decode together; they begin to end after `decode_steps`."""
        jobs = self._jobs(seed=1)
        draw = random.Random(2)
        span = OUTPUT_TOKENS[1] - OUTPUT_TOKENS[0]
        return [
            Job(next(jobs).token_ids, self.decode_steps + 1 + draw.randint(1, span)) for _ in range(self.rows)
        ]

    def later(self) -> Iterator[Job]:
        """Yield those that come when others have ended."""
        return self._jobs(seed=3)

    def _jobs(self, seed: int) -> Iterator[Job]:
        draw = random.Random(f"{self.rows}/{seed}")
        documents = max(1, self.cached_blocks // DOCUMENT_BLOCKS)
        while True:
            known = draw.choice((0, draw.randint(1, MOST_KNOWN_BLOCKS))) * BLOCK_SIZE
            own = tuple(draw.choices(range(2, VOCAB), k=draw.randint(*OWN_TOKENS)))
            yield Job(document(draw.randrange(documents), known) + own, draw.randint(*OUTPUT_TOKENS))


def document(number: int, length: int) -> tuple[int, ...]:
    """Return the first tokens of a document."""
    return tuple(random.Random(f"document {number}").choices(range(2, VOCAB), k=length))
