"""From a checkpoint to a fused decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from conch.api import CheckpointError
from conch.model.checkpoint import weight_files
from conch.model.describe import Description
from conch.model.fused.assemble import Assembler
from conch.model.fused.blueprint import Blueprint
from conch.model.fused.decoder import FusedDecoder
from conch.model.loading import load_module
from conch_kernels.cpu.library import Team

Progress = Callable[[str, float], None]
_STAGE = "packing weights"


def load_fused(description: Description, blueprint: Blueprint, progress: Progress) -> FusedDecoder:
    """Read and pack the weights, parameter by parameter: the peak is the packed model and one layer's matrix.

    Raises
    ------
    CheckpointError
        The checkpoint is not exactly what the model needs; as `conch.model.loading.load_module` says it.
    """
    weights = _as_stored(description, blueprint) or _through_transformers(description, progress)
    team = Team(torch.get_num_threads())
    assembler = Assembler(blueprint, description.spec, weights, team)
    return FusedDecoder(assembler.assemble(lambda share: progress(_STAGE, share)))


def _as_stored(description: Description, blueprint: Blueprint) -> Callable[[str], torch.Tensor] | None:
    """Give parameters straight from the files, where names and shapes are exactly those of the model."""
    from safetensors import SafetensorError, safe_open

    where: dict[str, str] = {}
    try:
        for path in weight_files(description.folder):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if blueprint.shapes.get(name) != tuple(file.get_slice(name).get_shape()):
                        return None
                    where[name] = str(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if where.keys() != blueprint.shapes.keys():
        return None
    dtype = getattr(torch, description.spec.attention.dtype)

    def read(name: str) -> torch.Tensor:
        with safe_open(where[name], framework="pt") as file:
            stored: torch.Tensor = file.get_tensor(name)
            return stored.to(dtype)

    return read


def _through_transformers(description: Description, progress: Progress) -> Callable[[str], torch.Tensor]:
    """Let transformers rename, tie and check; costs the memory of the model once more while it is packed."""
    module = load_module(description, progress)
    parameters: Mapping[str, torch.Tensor] = dict(module.named_parameters())
    return parameters.__getitem__
