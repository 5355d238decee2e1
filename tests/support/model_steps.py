"""Steps of a model without an engine: one request, its KV in the first blocks."""

from __future__ import annotations

import torch

from conch.api import BuildContext, EngineConfig, StepBatch
from conch.engine.catalogue import Catalogue
from conch.worker import prepare
from support.oracle import Oracle
from support.tiny import tiny_checkpoint

BLOCK = 16


def nothing(*_):
    """Hear of progress."""


def parts(kernel, family="llama", settings=None, **changes):
    """Return a prepared tiny model and what builds attention kernels for a spec."""
    fixed = {"dtype": "float32", "num_threads": 1, "attention_kernel": kernel}
    config = EngineConfig(**{"model": str(tiny_checkpoint(family, **changes)), **fixed, **(settings or {})})
    prepared = prepare(config, nothing)

    def build(spec):
        return Catalogue.load().build("attention_kernel", config.attention_kernel, BuildContext(config, spec))

    return prepared, build


def batch(start: int, count: int, ids, logit_rows) -> StepBatch:
    """Return a step of `count` tokens after `start` that are computed."""
    slots = torch.arange(start, start + count)
    blocks = torch.arange(-(-(start + count) // BLOCK), dtype=torch.int32)
    return StepBatch(
        input_ids=torch.as_tensor(ids),
        positions=slots,
        cu_query=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([start + count], dtype=torch.int32),
        block_tables=blocks[None],
        slot_mapping=slots,
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        max_query=count,
        max_seq_len=start + count,
    )


def pools(kernel, count, blocks=4, dtype=torch.float32):
    """Return KV pools of zeros, one a layer."""
    return [torch.zeros(kernel.kv_shape(blocks), dtype=dtype) for _ in range(count)]


def by_transformers(folder, tokens, layers):
    """Return the logits [T, V] of transformers, and what goes into layers: [T, layers, hidden]."""
    model = Oracle(folder).model
    found = {}
    inner = [*model.model.layers, model.model.norm]
    for index in layers:
        inner[index].register_forward_pre_hook(
            lambda _, args, kwargs, index=index: found.__setitem__(
                index, args[0] if args else kwargs["hidden_states"]
            ),
            with_kwargs=True,
        )
    with torch.inference_mode():
        output = model(input_ids=torch.as_tensor(tokens)[None], use_cache=False)
    return output.logits[0], torch.stack([found[index][0] for index in layers], dim=1)
