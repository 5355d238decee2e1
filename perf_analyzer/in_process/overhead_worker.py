"""The engine over a model that takes no time: what remains is the engine's own.

Scheduler, KV manager, prefix cache, worker, sampler and messages are the real ones; only the forward pass is
replaced, by logits that were drawn before. Options: ``{"settings": {... model.json ...}}``.
Question: ``{"rows": R, "steps": N, "prompt_tokens": P, "params": {... sampling ...}, "by_part": bool}``; the
answer holds microseconds a step, the median of steps in which R requests decode one token each.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from lines import serve

import conch.engine.build as build
import conch.worker.local as local
from conch.api import AttentionSpec, EngineConfig, ModelSpec
from conch.api.config import parse_config
from conch.api.sampling import SamplingParams
from conch.engine.build import build_engine
from conch.engine.core import Engine
from conch.engine.protocol import AddRequest, CancelRequest, StepNews
from conch.worker import Prepared

VOCAB = 49_152
SPREAD = 4.0  # of the logits: some hundred tokens share 95 % of the probability at temperature 0.8
MODEL_LEN = 8_192
SETTLING_STEPS = 20

PARTS = (
    ("plan", "_scheduler", "plan"),
    ("apply", "", "_apply"),
    ("submit, collect", "_parallelism", "collect"),
    ("worker", "_parallelism._worker", "execute"),
    ("learn", "_parallelism._worker", "_learn"),
    ("batch", "_parallelism._worker._builder", "build"),
    ("kernel plan", "_parallelism._worker._kernel", "plan"),
    ("model", "_parallelism._worker._model", "logits"),
    ("sample", "_parallelism._worker._sampler", "sample"),
    ("accept", "_parallelism._worker", "_accept"),
    ("drafts", "_parallelism._worker", "_with_drafts"),
    ("commit", "", "_commit"),
    ("step", "", "step"),
)
"""What is timed, and where it hangs in the engine. A part's time does not hold that of the parts in it."""


class InstantModel:
    """Returns logits that were drawn when it was made."""

    def __init__(self, rows: int) -> None:
        self._logits = SPREAD * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1))

    def logits(self, batch: Any, step: object) -> torch.Tensor:  # noqa: ANN401 - as in CausalModel
        """Return a row for each logit row of the batch: float32 [L, V]."""
        return self._logits[: len(batch.logit_rows)]


class Stopwatch:
    """Adds up the time of wrapped methods, each without what the others took within it."""

    def __init__(self) -> None:
        self._stack: list[float] = []
        self.seconds: Counter[str] = Counter()

    def watch(self, owner: object, method: str, part: str) -> None:
        """Replace a method of one object by one that is timed."""
        inner: Callable[..., Any] = getattr(owner, method)
        clock, stack, seconds = time.perf_counter, self._stack, self.seconds

        def timed(*args: object) -> object:
            stack.append(0.0)
            began = clock()
            try:
                return inner(*args)
            finally:
                took = clock() - began
                seconds[part] += took - stack.pop()
                if stack:
                    stack[-1] += took

        setattr(owner, method, timed)


def fake_model(config: EngineConfig) -> Prepared:
    """Describe a model that exists nowhere: one layer of SmolLM2's attention, for a small KV pool."""
    attention = AttentionSpec(9, 3, 64, 64, (None,), False, False, "bfloat16", "cpu", config.block_size)
    spec = ModelSpec("instant", "instant", VOCAB, MODEL_LEN, frozenset({0}), attention)
    return Prepared(config, SimpleNamespace(spec=spec, folder=Path()))


def build_instant(settings: dict[str, Any]) -> Engine:
    """Build an engine as it is built for a real model, but for the reading of the model."""
    config = parse_config({"model": "instant", **settings})
    build.prepare = lambda config, progress: fake_model(config)
    local.load_model = lambda *_: InstantModel(config.max_num_seqs)
    return build_engine(config, lambda stage, fraction: None).engine


def measure(engine: Engine, question: dict[str, Any], after_step: Callable[[], None]) -> list[float]:
    """Serve R requests until they all decode, then time N steps; returns seconds of each."""
    rows, steps = question["rows"], question["steps"]
    params = SamplingParams(max_tokens=MODEL_LEN, ignore_eos=True, **question["params"])
    prompt = tuple(range(1, question["prompt_tokens"] + 1))
    for request_id in range(1, rows + 1):
        engine.add(AddRequest(request_id=request_id, token_ids=(*prompt, request_id), params=params))
    while len(engine.step()) < rows:
        pass
    for _ in range(SETTLING_STEPS):
        engine.step()
    after_step()
    took = []
    encoder = msgspec.msgpack.Encoder()
    for _ in range(steps):
        began = time.perf_counter()
        outputs = tuple(engine.step())
        encoder.encode(StepNews(outputs))
        took.append(time.perf_counter() - began)
        if len(outputs) != rows:
            raise RuntimeError(f"{len(outputs)} rows decoded instead of {rows}")
    for request_id in range(1, rows + 1):
        engine.cancel(CancelRequest(request_id))
    engine.step()
    return took


def find(engine: Engine, path: str) -> object:
    """Follow a dotted path."""
    found: object = engine
    for name in filter(None, path.split(".")):
        found = getattr(found, name)
    return found


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Build one engine to be timed as it is, and one whose parts are watched."""
    plain, watched = build_instant(options["settings"]), build_instant(options["settings"])
    watch = Stopwatch()
    for part, path, method in PARTS:
        watch.watch(find(watched, path), method, part)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        whole = median(measure(plain, question, lambda: None))
        measure(watched, question, watch.seconds.clear)
        parts = {part: watch.seconds[part] / question["steps"] * 1e6 for part, _, _ in PARTS}
        return {"us_per_step": whole * 1e6, "parts_us": parts}

    return {"threads": torch.get_num_threads()}, answer


if __name__ == "__main__":
    serve(start)
