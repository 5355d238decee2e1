"""Single facts of a checkpoint: dtype, device, context length, ids that end an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from conch.api import CheckpointError, ConfigError
from conch.model.checkpoint import weight_files

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STRETCHING = ("linear", "yarn")
_MOVING = ("dynamic", "longrope")


def resolve_device(device: str) -> str:
    """Turn ``auto`` into ``cuda`` where there is one, else ``cpu``."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu or cuda[:index], not {device!r}") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {device!r}, and torch {torch.__version__} finds no CUDA device")
    return device


def choose_dtype(asked: str, text_config: Any, folder: Path) -> torch.dtype:  # noqa: ANN401
    """Return the dtype asked for; for ``auto`` that of the config, else that of the stored weights."""
    if asked != "auto":
        return _DTYPES[asked]
    stated = getattr(text_config, "dtype", None)
    name = str(stated).removeprefix("torch.") if stated is not None else _stored_dtype(folder)
    if name not in _DTYPES:
        raise CheckpointError(f"{folder} is in {name}; set dtype to one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _stored_dtype(folder: Path) -> str:
    from safetensors import safe_open

    with safe_open(weight_files(folder)[0], framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            tensor = file.get_tensor(name)
            if tensor.is_floating_point():
                return str(tensor.dtype).removeprefix("torch.")
    raise CheckpointError(f"{folder} holds no floating-point weights")


def choose_max_model_len(asked: int | None, text_config: Any) -> int:  # noqa: ANN401
    """Return the context length to serve.

    The default is what the checkpoint was trained for. RoPE scalings that stretch the same frequencies over
    more positions (linear, yarn) may be asked for all that they stretch to.
    """
    trained: int | None = getattr(text_config, "max_position_embeddings", None)
    if trained is None:
        if asked is None:
            raise ConfigError("max_model_len must be given: the checkpoint does not state its context length")
        return asked
    most = trained
    for rope in rope_parameters(text_config):
        if rope.get("rope_type") in _STRETCHING:
            original = rope.get("original_max_position_embeddings") or trained
            most = max(most, int(original * rope.get("factor", 1.0)))
    if asked is not None and asked > most:
        raise ConfigError(f"max_model_len must be at most {most}, the model's context length, not {asked}")
    _check_rope(text_config)
    return trained if asked is None else asked


def rope_parameters(text_config: Any) -> Iterator[Mapping[str, Any]]:  # noqa: ANN401
    """Yield the RoPE parameters of the model: one set, or one for each kind of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    yield from nested or ([parameters] if parameters else [])


def _check_rope(text_config: Any) -> None:  # noqa: ANN401
    """Refuse what `conch.model.rope` cannot pin: frequencies that move, set for each kind of layer."""
    sets = list(rope_parameters(text_config))
    moving = {rope.get("rope_type") for rope in sets} & set(_MOVING)
    if moving and len(sets) > 1:
        raise CheckpointError(
            f"RoPE of type {', '.join(sorted(map(str, moving)))} set for each kind of layer is not served: "
            "its frequencies depend on the longest sequence of a batch"
        )


def read_eos_token_ids(folder: Path, text_config: Any) -> frozenset[int]:  # noqa: ANN401
    """Return every id of generation_config.json, else of config.json, that ends an answer."""
    path = folder / "generation_config.json"
    stated = None
    if path.is_file():
        try:
            stated = json.loads(path.read_text()).get("eos_token_id")
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if stated is None:
        stated = getattr(text_config, "eos_token_id", None)
    if stated is None:
        return frozenset()
    return frozenset(stated if isinstance(stated, list) else [stated])
