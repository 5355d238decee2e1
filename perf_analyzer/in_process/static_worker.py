"""Static batching as transformers does it: pad a batch, generate until its longest request is done.

Options: ``{"model_folder", "dtype"}``. Question: ``{"requests": [{"text", "max_tokens"}], "batch_size": N}``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lines import serve
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

PAD_ID = 0


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``input_ids`` and ``attention_mask``, both int64 ``[rows, longest]``, padded on the left."""
    longest = max(map(len, prompts))
    ids = [[PAD_ID] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


@torch.inference_mode()
def generate(model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> int:
    """Run one batch for as many tokens as its longest request wants; return the tokens that were wanted."""
    input_ids, attention_mask = pad_left(prompts)
    config = GenerationConfig(
        max_new_tokens=max(max_tokens), do_sample=False, eos_token_id=None, pad_token_id=PAD_ID
    )
    output = model.generate(input_ids=input_ids, attention_mask=attention_mask, generation_config=config)
    new = output.shape[1] - input_ids.shape[1]
    if new != max(max_tokens):
        raise RuntimeError(f"generate made {new} tokens instead of {max(max_tokens)}")
    return sum(max_tokens)


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Load the model."""
    folder = Path(options["model_folder"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options["dtype"])).eval()
    model.generation_config.eos_token_id = None  # no request may end early: the work is fixed

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        requests, size = question["requests"], question["batch_size"]
        prompts = [tokenizer.encode(request["text"]).ids for request in requests]
        wanted = [request["max_tokens"] for request in requests]
        began = time.perf_counter()
        tokens = sum(
            generate(model, prompts[at : at + size], wanted[at : at + size])
            for at in range(0, len(requests), size)
        )
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    return {"torch_threads": torch.get_num_threads(), "dtype": str(model.dtype)}, answer


if __name__ == "__main__":
    serve(start)
