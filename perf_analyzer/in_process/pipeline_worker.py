"""The engine without Triton and always as many requests: how fast it is, and how busy its stages are.

Options: ``{"settings": {... model.json ...}}``.
Question: ``{"in_flight": N, "warm_up_s": S, "seconds": S}``; the answer holds what happened in `seconds`, and
the seconds in which each stage computed (none where there is one rank).
"""

from __future__ import annotations

import random
import time
from typing import Any

from lines import serve

from conch.api.config import parse_config
from conch.api.model_reference import resolve_model_reference
from conch.api.sampling import SamplingParams
from conch.engine.local import LocalEngine

PROMPT_TOKENS = (16, 48)
OUTPUT_TOKENS = (48, 80)


class Crowd:
    """Requests of random tokens; whenever one ends, another one comes."""

    def __init__(self, engine: LocalEngine, size: int) -> None:
        self._engine = engine
        self._draw = random.Random(size)
        self._ids = {self._add() for _ in range(size)}

    def serve(self, seconds: float) -> int:
        """Serve for so long; returns the tokens that were generated."""
        end_s = time.perf_counter() + seconds
        tokens = 0
        while time.perf_counter() < end_s:
            for output in self._engine.step():
                if output.failure is not None:
                    raise RuntimeError(f"a request failed: {output.failure.message}")
                tokens += len(output.token_ids)
                if output.finish_reason is not None:
                    self._ids.remove(output.request_id)
                    self._ids.add(self._add())
        return tokens

    def leave(self) -> None:
        """Cancel all, and wait until nothing is in flight."""
        for request_id in self._ids:
            self._engine.cancel(request_id)
        while self._engine.has_work:
            self._engine.step()

    def _add(self) -> int:
        draw = self._draw
        prompt = [draw.randrange(self._engine.info.vocab_size) for _ in range(draw.randint(*PROMPT_TOKENS))]
        params = SamplingParams(temperature=0, max_tokens=draw.randint(*OUTPUT_TOKENS), ignore_eos=True)
        return self._engine.add(prompt, params)


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Build the engine."""
    settings = options["settings"]
    engine = LocalEngine(parse_config({**settings, "model": resolve_model_reference(settings["model"])}))

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        crowd = Crowd(engine, asked["in_flight"])
        crowd.serve(asked["warm_up_s"])
        before, began_s = engine.stats(), time.perf_counter()
        tokens = crowd.serve(asked["seconds"])
        seconds, after = time.perf_counter() - began_s, engine.stats()
        crowd.leave()
        return {
            "seconds": seconds,
            "tokens": tokens,
            "steps": after.steps - before.steps,
            "stages_s": [b - a for a, b in zip(before.stages_s, after.stages_s, strict=True)],
        }

    return {}, answer


if __name__ == "__main__":
    serve(start)
