"""The continuous batching of transformers. Options: ``{"model", "dtype"}``."""

from __future__ import annotations

import time
from typing import Any

import torch
from lines import serve
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig


def run(manager: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:  # noqa: ANN401
    """Serve all prompts at once; the time of the first token is the earliest of its own time stamps."""
    began = time.perf_counter()
    names = manager.add_requests(inputs=prompts, max_new_tokens=max_tokens, record_timestamps=True)
    ended: dict[str, Any] = {}
    while len(ended) < len(names):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            ended[result.request_id] = result
        elif result is None and not manager.is_running():
            raise RuntimeError("its generation thread ended")
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "first_s": min(result.timestamps[0] for result in ended.values()) - began,
        "token_ids": [list(ended[name].generated_tokens) for name in names],
    }


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Load the model and start its generation thread."""
    model = AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=getattr(torch, options["dtype"]), attn_implementation="sdpa"
    ).eval()
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(max_batch_tokens=2048, num_blocks=128),
    )
    manager.start()
    return (
        {"torch_threads": torch.get_num_threads()},
        lambda question: run(manager, question["prompts"], question["max_tokens"]),
    )


if __name__ == "__main__":
    serve(start)
