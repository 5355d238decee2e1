"""Our engine in process. Options: ``{"model", "settings": {... model.json ...}}``."""

from __future__ import annotations

import time
from typing import Any

import torch
from lines import serve

from conch.api.config import parse_config
from conch.api.sampling import SamplingParams
from conch.engine.local import LocalEngine


def run(engine: LocalEngine, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Serve all prompts at once and say when the first token came."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    began = time.perf_counter()
    made: dict[int, list[int]] = {engine.add(prompt, params): [] for prompt in prompts}
    first_s = None
    while engine.has_work:
        for output in engine.step():
            if output.failure is not None:
                raise RuntimeError(f"a request failed: {output.failure.message}")
            if output.token_ids and first_s is None:
                first_s = time.perf_counter() - began
            made[output.request_id].extend(output.token_ids)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "first_s": first_s, "token_ids": list(made.values())}


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Build the engine."""
    engine = LocalEngine(parse_config({**options["settings"], "model": options["model"]}))
    ready = {"torch_threads": torch.get_num_threads(), "block_size": engine.info.block_size}
    return ready, lambda question: run(engine, question["prompts"], question["max_tokens"])


if __name__ == "__main__":
    serve(start)
