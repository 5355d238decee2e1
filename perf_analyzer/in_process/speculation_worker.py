"""The engine without Triton, with a drafter or without: how fast it decodes, and what became of the drafts.

Options: ``{"settings": {... model.json ...}}``. Question: ``{"prompts": [[token ids]] or "chats": [text],
"max_tokens", "at_once": N, "drafts": k or null}``: greedy, each for exactly `max_tokens`, N at a time, each N
to their end. Timed is decoding alone: of each N, from the moment when all have their first token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lines import serve

from conch.api.config import parse_config
from conch.api.model_reference import resolve_model_reference
from conch.api.sampling import SamplingParams
from conch.engine.local import LocalEngine
from conch.host.chat_template import load_chat_template
from conch.host.codec import TextCodec

COUNTS = ("drafts", "drafts_proposed", "drafts_accepted", "drafting_s", "steps")


@dataclass
class Decoded:
    """What decoding brought so far."""

    seconds: float = 0.0
    tokens: int = 0
    token_ids: list[list[int]] = field(default_factory=list)


def decode(engine: LocalEngine, prompts: Sequence[list[int]], params: SamplingParams, into: Decoded) -> None:
    """Serve prompts at once, and add what was decoded after all had their first token."""
    made: dict[int, list[int]] = {engine.add(prompt, params): [] for prompt in prompts}
    began_s, had = None, 0
    while engine.has_work:
        for output in engine.step():
            if output.failure is not None:
                raise RuntimeError(f"a request failed: {output.failure.message}")
            made[output.request_id].extend(output.token_ids)
        if began_s is None and all(made.values()):
            began_s, had = time.perf_counter(), sum(map(len, made.values()))
    assert began_s is not None, "all have had a first token"
    into.seconds += time.perf_counter() - began_s
    into.tokens += sum(map(len, made.values())) - had
    into.token_ids += made.values()


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Build the engine."""
    settings = options["settings"]
    config = parse_config({**settings, "model": resolve_model_reference(settings["model"])})
    engine = LocalEngine(config)
    folder = Path(engine.info.model_folder)
    codec, template = TextCodec.load(folder), load_chat_template(folder)

    def ids_of(question: dict[str, Any]) -> list[list[int]]:
        asked = [template.render([{"role": "user", "content": text}]) for text in question.get("chats", ())]
        return question.get("prompts") or [codec.encode(text, add_special_tokens=False) for text in asked]

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        prompts, at_once = ids_of(question), question["at_once"]
        params = SamplingParams(
            temperature=0,
            max_tokens=question["max_tokens"],
            ignore_eos=True,
            num_speculative_tokens=question.get("drafts"),
        )
        before, decoded = engine.stats(), Decoded()
        for first in range(0, len(prompts), at_once):
            decode(engine, prompts[first : first + at_once], params, decoded)
        after = engine.stats()
        positions = list(after.accepted_by_position)
        for place, count in enumerate(before.accepted_by_position):
            positions[place] -= count
        return {
            "seconds": decoded.seconds,
            "tokens": decoded.tokens,
            "token_ids": decoded.token_ids,
            "accepted_by_position": positions,
            **{name: getattr(after, name) - getattr(before, name) for name in COUNTS},
        }

    return {"torch_threads": torch.get_num_threads(), "max_model_len": engine.info.max_model_len}, answer


if __name__ == "__main__":
    serve(start)
