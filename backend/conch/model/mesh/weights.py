"""The slices of a rank, read from safetensors into its model."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from conch.api import CheckpointError
from conch.model.checkpoint import weight_files
from conch.model.describe import Description
from conch.model.mesh.cut import Share, Source
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
    dtype = getattr(torch, description.spec.attention.dtype)
    with ExitStack() as stack:
        stored = _Stored(description.folder, stack)
        stored.check_names(description)
        untied = _untied(share, description, stored)
        count = len(share.sources)
        for index, (name, source) in enumerate(share.sources.items()):
            value = stored.read(untied.get(name, source))
            if value.is_floating_point() and not any(part in name for part in description.keep_fp32):
                value = value.to(dtype)
            _set(module, name, torch.nn.Parameter(value, requires_grad=False))
            progress(_STAGE, index / count)
    pin_rope(module, description.spec.max_model_len)
    module.eval()
    progress(_STAGE, 1.0)


def _untied(share: Share, description: Description, stored: _Stored) -> dict[str, Source]:
    """Return where a tied head really comes from: the embedding, unless the checkpoint has another head."""
    if not share.is_tied:
        return {}
    whole = dict((id(part), name) for name, part in description.meta.named_modules())
    embedding = whole[id(description.meta.get_input_embeddings())] + ".weight"
    head = whole[id(description.meta.get_output_embeddings())] + ".weight"
    if head not in share.sources:
        return {}
    own = share.sources[head]
    shared = Source(embedding, own.shape, own.dim, own.part)
    if head in stored.names and not torch.equal(stored.read(own), stored.read(shared)):
        return {}
    return {head: shared}


def _fill_buffers(module: Any) -> None:  # noqa: ANN401 - transformers is not typed
    """Compute what no checkpoint holds: RoPE frequencies and the like."""
    for owner in module.modules():
        missing = [name for name, buffer in owner.named_buffers(recurse=False) if buffer.is_meta]
        for name in missing:
            buffer = getattr(owner, name)
            owner.register_buffer(name, torch.empty_like(buffer, device="cpu"), persistent=False)
        if missing:
            module._init_weights(owner)


def _set(module: Any, name: str, weight: torch.nn.Parameter) -> None:  # noqa: ANN401
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, weight)


class _Stored:
    """The tensors of a checkpoint, none of them read yet."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        from safetensors import SafetensorError, safe_open

        self._folder = folder
        self.names: dict[str, Any] = {}
        for path in weight_files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"cannot read {path}: {error}") from error
            self.names.update(dict.fromkeys(file.keys(), file))

    def check_names(self, description: Description) -> None:
        """Refuse a tensor that the model lacks."""
        known = description.meta.state_dict().keys()
        ignored = [*(description.meta._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
        for name in self.names:
            if name not in known and not any(re.search(pattern, name) for pattern in ignored):
                raise CheckpointError(
                    f"{self._folder} holds parameter {name}, which the model lacks; several ranks "
                    "read checkpoints only under the names of transformers' own modules"
                )

    def read(self, source: Source) -> torch.Tensor:
        """Read a slice into memory of its own."""
        file = self.names.get(source.name)
        if file is None:
            raise CheckpointError(f"{self._folder} lacks parameter {source.name}")
        stored = file.get_slice(source.name)
        if tuple(stored.get_shape()) != source.shape:
            raise CheckpointError(
                f"{self._folder} holds parameter {source.name} in another shape than its config says"
            )
        if source.part is None:
            return file.get_tensor(source.name).clone()  # type: ignore[no-any-return]
        rows = slice(*source.part)
        read: torch.Tensor = stored[:, rows] if source.dim else stored[rows]
        return read.clone()
