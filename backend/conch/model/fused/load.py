"""From a checkpoint to a fused decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from conch.api import CheckpointError, ConfigError, EngineConfig
from conch.api.model_reference import resolve_model_reference
from conch.model.checkpoint import weight_files
from conch.model.describe import Description
from conch.model.fused.assemble import Assembler
from conch.model.fused.blueprint import Blueprint
from conch.model.fused.decoder import FusedDecoder
from conch.model.fused.matrices import DenseMatrices, GroupedMatrices, Matrices, Source
from conch.model.fused.recognise import recognise
from conch.model.gguf import open_gguf
from conch.model.gguf_weights import GgufWeights, RawTensor
from conch.model.loading import load_module
from conch_kernels.cpu.library import Team

Progress = Callable[[str, float], None]
_STAGE = "packing weights"


def load_fused(description: Description, config: EngineConfig, progress: Progress) -> FusedDecoder:
    """Read and pack the weights, parameter by parameter: the peak is the packed model and one layer's matrix.

    Raises
    ------
    NotRecognised
        The model cannot be fused.
    CheckpointError
        The checkpoint is not exactly what the model needs; as `conch.model.loading.load_module` says it.
    ConfigError
        `quantization` asks for what the checkpoint does not have.
    """
    as_stored = config.quantization == "gguf"
    blueprint = recognise(description.meta, description.hf_config, description.spec)
    if as_stored:
        source: Source = _gguf(config, blueprint)
    elif (where := _names_if_exact(description.folder, blueprint)) is not None:
        source = _Parameters(lambda name: _read(where[name], name))
    else:  # let transformers rename, tie and check; this costs the memory of the model once more
        module = load_module(description, progress)
        blueprint = recognise(module, description.hf_config, description.spec)
        source = _Parameters(dict(module.named_parameters()).__getitem__)
    dtype = getattr(torch, description.spec.attention.dtype)
    dense = DenseMatrices(source, blueprint.shapes, dtype, Team(torch.get_num_threads()))
    matrices: Matrices = dense
    if config.quantization is not None:
        matrices = GroupedMatrices(source, blueprint.shapes, dense, as_stored)
    assembler = Assembler(blueprint, description.spec, source, matrices)
    return FusedDecoder(assembler.assemble(lambda share: progress(_STAGE, share)))


class _Parameters:
    """Parameters that are floats in the checkpoint."""

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        self.dense = read

    def kind(self, name: str) -> str | None:
        """Return None: nothing is stored quantised."""
        return None

    def raw(self, name: str) -> RawTensor | None:
        """Return None."""
        return None


def _gguf(config: EngineConfig, blueprint: Blueprint) -> Source:
    path = Path(resolve_model_reference(config.model)).expanduser()
    if path.suffix.lower() != ".gguf":
        raise ConfigError(f"quantization 'gguf' serves the blocks of a .gguf file, and {path} is none")
    weights = GgufWeights(open_gguf(path))
    stored, needed = weights.shapes().items(), blueprint.shapes.items()
    for name, shape in sorted(stored ^ needed):
        has = "holds" if (name, shape) in stored else "lacks"
        raise CheckpointError(f"{path} {has} parameter {name} of shape {list(shape)}, unlike the model")
    return weights


def _names_if_exact(folder: Path, blueprint: Blueprint) -> dict[str, Path] | None:
    """Return in which file each parameter is, if names and shapes are exactly those of the model."""
    from safetensors import SafetensorError, safe_open

    where: dict[str, Path] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if blueprint.shapes.get(name) != tuple(file.get_slice(name).get_shape()):
                        return None
                    where[name] = path
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
    return where if where.keys() == blueprint.shapes.keys() else None


def _read(path: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor
