"""Perplexity of a text under the model as our engine runs it, or under transformers in fp32.

Options: ``{"model": reference, "text": path}``. Question: ``{"settings": {... model.json ...}}``, or null for
transformers; the answer holds the perplexity over all tokens but the first, and their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lines import serve

from conch.api import StepBatch
from conch.api.config import parse_config
from conch.engine.build import build_engine
from conch.model.attention import PagedStep
from conch.worker import prepare

CHUNK = 256


def quiet(stage: str, fraction: float) -> None:
    """Show no progress."""


def batch_of(ids: torch.Tensor, start: int, end: int, block_size: int) -> StepBatch:
    """Return a step of tokens [start, end) of the only sequence, whose KV lies in block 0 and on."""
    positions = torch.arange(start, end)
    return StepBatch(
        input_ids=ids[start:end],
        positions=positions,
        cu_query=torch.tensor([0, end - start], dtype=torch.int32),
        seq_lens=torch.tensor([end], dtype=torch.int32),
        block_tables=torch.arange(-(-end // block_size), dtype=torch.int32)[None],
        slot_mapping=positions,
        logit_rows=torch.arange(end - start),
        max_query=end - start,
        max_seq_len=end,
    )


def surprise(logits: torch.Tensor, following: torch.Tensor) -> float:
    """Return the negative log likelihood of the tokens that followed, summed."""
    return float(torch.nn.functional.cross_entropy(logits.float(), following, reduction="sum"))


def under_engine(ids: torch.Tensor, model: str, settings: dict[str, Any]) -> float:
    """Run the text through the model room of an engine, chunk by chunk, KV cached between."""
    config = parse_config({"model": model, "num_gpu_blocks_override": len(ids), **settings})
    worker: Any = build_engine(config, quiet).engine._parallelism._worker
    total = 0.0
    with torch.inference_mode():
        for start in range(0, len(ids) - 1, CHUNK):
            end = min(start + CHUNK, len(ids) - 1)
            batch = batch_of(ids, start, end, config.block_size)
            step = PagedStep(worker._kernel, worker._kernel.plan(batch), worker._pools)
            total += surprise(worker._model.logits(batch, step).values, ids[start + 1 : end + 1])
    worker.close()
    return total


def under_transformers(ids: torch.Tensor, folder: Path) -> float:
    """Run the text through the model as transformers has it, in fp32 and all at once."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    with torch.inference_mode():
        return surprise(model(input_ids=ids[None], use_cache=False).logits[0, :-1], ids[1:])


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Tokenise the text."""
    from tokenizers import Tokenizer

    model = options["model"]
    folder = prepare(parse_config({"model": model}), quiet).folder
    text = Path(options["text"]).read_text(encoding="utf-8")
    ids = torch.tensor(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        settings = question["settings"]
        whole = under_transformers(ids, folder) if settings is None else under_engine(ids, model, settings)
        return {"perplexity": math.exp(whole / (len(ids) - 1))}

    return {"tokens": len(ids)}, answer


if __name__ == "__main__":
    serve(start)
