"""What an EAGLE checkpoint says of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conch.api import CheckpointError, ModelSpec

_LAYER_NAMES = ("midlayer.", "layers.0.")
_AUX = "eagle_aux_hidden_state_layer_ids"
_ROPE_KINDS = (None, "default")


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Sizes and constants of a head.

    Attributes
    ----------
    is_eagle3
        Whether it reads several of the target's layers and normalises what it reads; else it reads what comes
        out of the target's final norm.
    state_layers
        Layers of the target whose input is read; one past the last for what comes out of that.
    heads, kv_heads, head_size
        Of its attention.
    eps, rope_theta
        As in any Llama.
    normed_residual
        Whether the stream goes on from the normalised state.
    """

    is_eagle3: bool
    state_layers: tuple[int, ...]
    heads: int
    kv_heads: int
    head_size: int
    eps: float
    rope_theta: float
    normed_residual: bool

    def rope_angles(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines for so many positions: float32 [count, head_size / 2] each."""
        half = self.head_size // 2
        rates = self.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(count, dtype=torch.float64)[:, None] * rates
        return angles.cos().float(), angles.sin().float()


class HeadTensors:
    """The tensors of a checkpoint by their short names, whatever the layer is called there.

    Parameters
    ----------
    folder
        Where it is from, for messages.
    stored
        By their full names.
    """

    def __init__(self, folder: Path, stored: Mapping[str, torch.Tensor]) -> None:
        self.folder = folder
        self._tensors = {_short(name): tensor for name, tensor in stored.items()}
        self._left = set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that must be there."""
        if name not in self._tensors:
            raise CheckpointError(f"{self.folder} lacks {name}: not an EAGLE head")
        return tuple(self._tensors[name].shape)

    def shape_or_none(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor that may be missing."""
        return tuple(self._tensors[name].shape) if name in self._tensors else None

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor that must be there, of this shape."""
        found = self.shape(name)
        if found != shape:
            raise CheckpointError(f"{self.folder}: {name} is {list(found)}, and {list(shape)} is needed")
        self._left.discard(name)
        return self._tensors[name]

    def find(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return a tensor that may be missing."""
        return self.take(name, shape) if name in self._tensors else None

    def check_all_used(self) -> None:
        """Refuse a checkpoint that holds more than was taken."""
        left = sorted(name for name in self._left if "rotary_emb" not in name)
        if left:
            raise CheckpointError(f"{self.folder} holds {left[0]}, which no EAGLE layout has")


def read_layout(folder: Path, tensors: HeadTensors, target: ModelSpec, hidden: int) -> HeadLayout:
    """Tell the layout by the tensors, and the sizes by config.json.

    Parameters
    ----------
    hidden
        Size of the target's states.

    Raises
    ------
    CheckpointError
        It is not a head for the target, or of a make that is not served.
    """
    config = _read_config(folder)
    depth = config.get("num_hidden_layers", 1)
    if depth != 1:
        raise CheckpointError(f"{folder}: heads of one layer are served, and this one has {depth}")
    if config.get("hidden_size", hidden) != hidden:
        raise CheckpointError(f"{folder}: hidden_size is {config['hidden_size']}, the target's {hidden}")
    wide, into = tensors.shape("layer.self_attn.q_proj.weight")
    is_eagle3 = into == 2 * hidden
    if not is_eagle3 and into != hidden:
        raise CheckpointError(f"{folder}: its queries are made of {into} numbers; the target has {hidden}")
    said = " ".join(config.get("architectures") or ())
    if "Eagle3" in said and not is_eagle3:
        raise CheckpointError(f"{folder}: {said} has queries of two inputs, and these have one")
    heads = config.get("num_attention_heads", target.attention.num_heads)
    size = config.get("head_dim") or wide // heads
    if heads * size != wide:
        raise CheckpointError(f"{folder}: {heads} heads of {size} do not make {wide} queries")
    return HeadLayout(
        is_eagle3=is_eagle3,
        state_layers=_state_layers(folder, config, target, is_eagle3),
        heads=heads,
        kv_heads=tensors.shape("layer.self_attn.k_proj.weight")[0] // size,
        head_size=size,
        eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(folder, config),
        normed_residual=bool(config.get("norm_before_residual", False)),
    )


def _state_layers(
    folder: Path, config: Mapping[str, Any], target: ModelSpec, is_eagle3: bool
) -> tuple[int, ...]:
    count = target.num_layers
    if not is_eagle3:
        return (count,)
    own = (config.get("eagle_config") or {}).get(_AUX) or config.get(_AUX)
    layers = tuple(own) if own else (2, count // 2, count - 3)
    is_rising = all(isinstance(one, int) for one in layers) and list(layers) == sorted(set(layers))
    if not is_rising or not 0 <= layers[0] <= layers[-1] <= count:
        raise CheckpointError(
            f"{folder}: {_AUX} must be rising numbers of the target's {count} layers; {list(layers)} are not"
        )
    return layers


def _rope_theta(folder: Path, config: Mapping[str, Any]) -> float:
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in _ROPE_KINDS:
        raise CheckpointError(f"{folder}: rotary embeddings of kind {kind!r} are not served in heads")
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a mapping")
    return {**config, **(config.get("transformer_layer_config") or {})}


def _short(name: str) -> str:
    name = name.removeprefix("model.")
    for prefix in _LAYER_NAMES:
        if name.startswith(prefix):
            return "layer." + name.removeprefix(prefix)
    return name
