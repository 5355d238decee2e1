"""OpenVINO GenAI's continuous batching. Options: ``{"model", "properties": {...}}``."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai
from lines import serve


def run(
    pipeline: openvino_genai.ContinuousBatchingPipeline,
    names: itertools.count[int],
    prompts: list[list[int]],
    max_tokens: int,
) -> dict[str, Any]:
    """Serve all prompts at once, step by step, and say when the first token came."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.ignore_eos = True
    config.do_sample = False
    began = time.perf_counter()
    handles = [
        pipeline.add_request(next(names), openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
        for prompt in prompts
    ]
    made: list[list[int]] = [[] for _ in handles]
    first_s = None
    while pipeline.has_non_finished_requests():
        pipeline.step()
        for ids, handle in zip(made, handles, strict=True):
            while handle.can_read():
                for output in handle.read().values():
                    ids.extend(output.generated_ids)
        if first_s is None and any(made):
            first_s = time.perf_counter() - began
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "first_s": first_s, "token_ids": made}


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Load the model."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        options["model"], scheduler, "CPU", options.get("properties", {})
    )
    names = itertools.count()
    return {}, lambda question: run(pipeline, names, question["prompts"], question["max_tokens"])


if __name__ == "__main__":
    serve(start)
