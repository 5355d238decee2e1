"""The slices of a rank, read from safetensors into its model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from conch.model.describe import Description
from conch.model.mesh.cut import Share
from conch.model.mesh.source import Source
from conch.model.mesh.stored import Stored
from conch.model.rope import pin_rope

Progress = Callable[[str, float], None]
_STAGE = "loading weights"


def fill(share: Share, description: Description, progress: Progress) -> None:
    """Give a share its memory, and read what belongs there, nothing else.

    Raises
    ------
    CheckpointError
        A parameter is missing from the checkpoint, has another shape there, or the checkpoint holds one that
        the model lacks.
    """
    module = share.module
    _fill_buffers(module)
    with ExitStack() as stack:
        stored = Stored(description, stack)
        untied = _untied(share, description, stored)
        count = len(share.sources)
        for index, (name, source) in enumerate(share.sources.items()):
            _set(module, name, as_served(stored.read(untied.get(name, source)), name, description))
            progress(_STAGE, index / count)
    pin_rope(module, description.spec.max_model_len)
    module.eval()
    progress(_STAGE, 1.0)


def as_served(value: torch.Tensor, name: str, description: Description) -> torch.Tensor:
    """Return what was read of a parameter in the dtype in which it is served."""
    if not value.is_floating_point() or any(part in name for part in description.keep_fp32):
        return value
    return value.to(getattr(torch, description.spec.attention.dtype))


def _untied(share: Share, description: Description, stored: Stored) -> dict[str, Source]:
    """Return where a tied head really comes from: the embedding, unless the checkpoint has another head."""
    if not share.is_tied:
        return {}
    whole = dict((id(part), name) for name, part in description.meta.named_modules())
    embedding = whole[id(description.meta.get_input_embeddings())] + ".weight"
    head = whole[id(description.meta.get_output_embeddings())] + ".weight"
    if head not in share.sources:
        return {}
    own = share.sources[head]
    shared = Source(embedding, own.shape, own.cuts)
    if stored.has(head) and not torch.equal(stored.read(own), stored.read(shared)):
        return {}
    return {head: shared}


def _fill_buffers(module: Any) -> None:  # noqa: ANN401 - transformers is not typed
    """Compute what no checkpoint holds: RoPE frequencies and the like."""
    for owner in module.modules():
        buffers = owner.named_buffers(recurse=False)
        passing = owner._non_persistent_buffers_set
        missing = [name for name, buffer in buffers if buffer.is_meta and name in passing]
        for name in missing:
            buffer = getattr(owner, name)
            owner.register_buffer(name, torch.empty_like(buffer, device="cpu"), persistent=False)
        if missing:
            module._init_weights(owner)


def _set(module: Any, name: str, value: torch.Tensor) -> None:  # noqa: ANN401
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    is_buffer = leaf in owner._buffers
    setattr(owner, leaf, value if is_buffer else torch.nn.Parameter(value, requires_grad=False))
