"""The engine without Triton, for comparisons: serves a list of requests and says how long it took.

Options: ``{"settings": {... model.json ...}}``.
Question: ``{"requests": [{"text", "max_tokens"}], "concurrency": N, "policy": "continuous" | "static"}``;
with ``"sample_kv": true`` the answer holds KV occupancy summed over the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lines import serve
from tokenizers import Tokenizer

from conch.api.config import parse_config
from conch.api.model_reference import resolve_model_reference
from conch.api.sampling import SamplingParams
from conch.engine.local import LocalEngine


@dataclass(frozen=True)
class Job:
    """A tokenised request."""

    token_ids: tuple[int, ...]
    params: SamplingParams


class KvSampler:
    """Sums KV occupancy over steps, so that its ratios are means weighted by what was allocated."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._sums = {"allocated": 0, "used": 0, "whole_context": 0, "steps": 0}

    def sample(self) -> None:
        """Take the state between two steps."""
        info, stats = self._engine.info, self._engine.stats()
        self._sums["allocated"] += stats.kv_blocks_used * info.block_size
        self._sums["used"] += stats.kv_tokens_used
        self._sums["whole_context"] += stats.running * info.max_model_len
        self._sums["steps"] += 1

    def totals(self) -> dict[str, int]:
        """Return token slots: allocated, holding KV, and what reserving the whole context would take."""
        return dict(self._sums)


class NoSampler:
    """Samples nothing: a timed run is not to pay for statistics."""

    def sample(self) -> None:
        """Do nothing."""

    def totals(self) -> dict[str, int]:
        """Return nothing."""
        return {}


def run(
    engine: LocalEngine, waves: Iterator[list[Job]], concurrency: int, sampler: KvSampler | NoSampler
) -> int:
    """Serve wave after wave, each to its end, at most `concurrency` jobs at once; return output tokens."""
    tokens = 0
    for wave in waves:
        queue, running = iter(wave), 0
        while True:
            while running < concurrency and (job := next(queue, None)) is not None:
                engine.add(job.token_ids, job.params)
                running += 1
            if not running:
                break
            for output in engine.step():
                if output.failure is not None:
                    raise RuntimeError(f"a request failed: {output.failure.message}")
                tokens += len(output.token_ids)
                running -= output.finish_reason is not None
            sampler.sample()
    return tokens


def waves(jobs: list[Job], concurrency: int, policy: str) -> Iterator[list[Job]]:
    """Split jobs into waves: one of all (continuous batching) or batches that wait for their longest."""
    size = len(jobs) if policy == "continuous" else concurrency
    for start in range(0, len(jobs), size):
        yield jobs[start : start + size]


def make_jobs(tokenizer: Tokenizer, requests: Sequence[dict[str, Any]]) -> list[Job]:
    """Tokenise requests; each is served greedily for exactly its `max_tokens`."""
    return [
        Job(
            tuple(tokenizer.encode(request["text"]).ids),
            SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True),
        )
        for request in requests
    ]


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Build the engine."""
    settings = options["settings"]
    config = parse_config({**settings, "model": resolve_model_reference(settings["model"])})
    engine = LocalEngine(config)
    tokenizer = Tokenizer.from_file(str(Path(engine.info.model_folder) / "tokenizer.json"))

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        jobs = make_jobs(tokenizer, question["requests"])
        sampler = KvSampler(engine) if question.get("sample_kv") else NoSampler()
        policy, concurrency = question.get("policy", "continuous"), question["concurrency"]
        hits = engine.stats().prefix_hits
        began = time.perf_counter()
        tokens = run(engine, waves(jobs, concurrency, policy), concurrency, sampler)
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "tokens": tokens,
            "prompt_tokens": [len(job.token_ids) for job in jobs],
            "prefix_hits": engine.stats().prefix_hits - hits,
            "kv": sampler.totals(),
        }

    ready = {
        "model_folder": engine.info.model_folder,
        "block_size": engine.info.block_size,
        "max_model_len": engine.info.max_model_len,
        "torch_threads": torch.get_num_threads(),
    }
    return ready, answer


if __name__ == "__main__":
    serve(start)
