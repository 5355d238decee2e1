"""Tensors of a head on its device: the checkpoint's own, and what it shares with the target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conch.api import CheckpointError
from conch.model.checkpoint import weight_files
from conch.model.describe import Description
from conch.model.eagle.layout import HeadLayout, HeadTensors, read_layout

_STRANGE = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "final_logit_softcapping")


@dataclass(frozen=True, slots=True, eq=False)
class HeadWeights:
    """What a head computes with. Norms are fp32, matrices of the target's dtype; absent ones are None.

    Attributes
    ----------
    embedding : [V, h]
    fusing, fusing_bias
        From states (EAGLE-1: from an embedding and a state) to the layer's width.
    embedding_norm, state_norm, mlp_norm, last_norm
        EAGLE-1 has only that before its MLP. `target_norm` is the target's final norm, for EAGLE-1.
    qkv, qkv_bias, out, up, down
        Queries, keys and values in one; gate and up in one.
    logits : [D, h]
        Rows of the output head.
    drafted : int64 [D] or None
        Token of each row; None where they are the target's vocabulary.
    """

    embedding: torch.Tensor
    fusing: torch.Tensor
    fusing_bias: torch.Tensor | None
    embedding_norm: torch.Tensor | None
    state_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    last_norm: torch.Tensor | None
    target_norm: torch.Tensor | None
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    logits: torch.Tensor
    drafted: torch.Tensor | None


def read_head(folder: Path, target: Description) -> tuple[HeadLayout, HeadWeights]:
    """Read a head for a target.

    Raises
    ------
    CheckpointError
        It cannot be read, or is not a head for this target.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json: not an EAGLE head")
    config = target.hf_config.get_text_config()
    odd = [key for key in _STRANGE if getattr(config, key, None) not in (None, 1, 1.0)]
    if odd or config.model_type.startswith("gemma"):
        raise CheckpointError(f"heads for {config.model_type} models are not served")
    tensors = HeadTensors(folder, _stored(folder))
    hidden = int(config.hidden_size)
    layout = read_layout(folder, tensors, target.spec, hidden)
    weights = _Reader(tensors, _Shared(target), layout, hidden).read()
    tensors.check_all_used()
    return layout, weights


class _Shared:
    """Parameters of the target that a head may use: mapped from its files, which costs no memory."""

    def __init__(self, target: Description) -> None:
        self._folder, self._module = target.folder, target.meta
        self._names = {id(parameter): name for name, parameter in target.meta.named_parameters()}
        self.dtype: torch.dtype = getattr(torch, target.spec.attention.dtype)
        self.device = torch.device(target.spec.attention.device)
        self.vocab_size = target.spec.vocab_size
        self._mapped: dict[str, torch.Tensor] = {}

    def embedding(self) -> torch.Tensor:
        return self._read(self._module.get_input_embeddings().weight)

    def logits(self) -> torch.Tensor:
        return self._read(self._module.get_output_embeddings().weight)

    def norm(self) -> torch.Tensor:
        return self._read(self._module.get_decoder().norm.weight)

    def _read(self, parameter: Any) -> torch.Tensor:  # noqa: ANN401
        name = self._names[id(parameter)]
        self._mapped = self._mapped or _stored(self._folder)
        if name not in self._mapped:
            raise CheckpointError(f"the head shares {name}, which {self._folder} does not hold by that name")
        return self._mapped[name].to(self.device, self.dtype)


class _Reader:
    """Takes the tensors of a layout."""

    def __init__(self, tensors: HeadTensors, shared: _Shared, layout: HeadLayout, hidden: int) -> None:
        self._tensors, self._shared, self._layout, self._hidden = tensors, shared, layout, hidden

    def read(self) -> HeadWeights:
        layout, hidden, tensors = self._layout, self._hidden, self._tensors
        into = 2 * hidden if layout.is_eagle3 else hidden
        wide, narrow = layout.heads * layout.head_size, layout.kv_heads * layout.head_size
        parts = (("q", wide), ("k", narrow), ("v", narrow))
        biases = [tensors.find(f"layer.self_attn.{name}_proj.bias", (size,)) for name, size in parts]
        inner = tensors.shape("layer.mlp.gate_proj.weight")[0]
        fused = len(layout.state_layers) if layout.is_eagle3 else 2
        has_own = layout.is_eagle3
        fusing_bias = tensors.find("fc.bias", (hidden,))
        logits, drafted = self._output()
        return HeadWeights(
            embedding=self._own_or("embed_tokens.weight", self._shared.embedding),
            fusing=self._matrix("fc.weight", (hidden, fused * hidden)),
            fusing_bias=None if fusing_bias is None else self._moved(fusing_bias),
            embedding_norm=self._norm("layer.input_layernorm.weight") if has_own else None,
            state_norm=self._norm("layer.hidden_norm.weight") if has_own else None,
            mlp_norm=self._norm("layer.post_attention_layernorm.weight"),
            last_norm=self._norm("norm.weight") if has_own else None,
            target_norm=None if has_own else self._shared.norm().float(),
            qkv=torch.cat(
                [self._matrix(f"layer.self_attn.{name}_proj.weight", (size, into)) for name, size in parts]
            ),
            qkv_bias=torch.cat([self._moved(bias) for bias in biases if bias is not None])
            if all(bias is not None for bias in biases)
            else None,
            out=self._matrix("layer.self_attn.o_proj.weight", (hidden, wide)),
            up=torch.cat(
                [self._matrix(f"layer.mlp.{name}_proj.weight", (inner, hidden)) for name in ("gate", "up")]
            ),
            down=self._matrix("layer.mlp.down_proj.weight", (hidden, inner)),
            logits=logits,
            drafted=drafted,
        )

    def _output(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the rows of the output head, and their tokens where there is a reduced vocabulary."""
        tensors, vocab_size = self._tensors, self._shared.vocab_size
        tensors.find("t2d", (vocab_size,))  # says the same as d2t
        if (shape := tensors.shape_or_none("d2t")) is None:
            return self._own_or("lm_head.weight", self._shared.logits), None
        offsets = tensors.take("d2t", shape)
        drafted = (offsets.long() + torch.arange(len(offsets))).to(self._shared.device)
        if drafted.min() < 0 or drafted.max() >= vocab_size or len(set(drafted.tolist())) < len(drafted):
            raise CheckpointError(f"{tensors.folder}: d2t does not map to {vocab_size} tokens, each to one")
        own = tensors.find("lm_head.weight", (len(drafted), self._hidden))
        rows = self._shared.logits()[drafted] if own is None else self._moved(own)
        return rows.contiguous(), drafted

    def _own_or(self, name: str, shared: Any) -> torch.Tensor:  # noqa: ANN401
        own = self._tensors.find(name, (self._shared.vocab_size, self._hidden))
        result: torch.Tensor = shared() if own is None else self._moved(own)
        return result

    def _matrix(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._moved(self._tensors.take(name, shape))

    def _norm(self, name: str) -> torch.Tensor:
        return self._tensors.take(name, (self._hidden,)).to(self._shared.device, torch.float32)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._shared.device, self._shared.dtype)


def _stored(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        try:
            found.update(load_file(path))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
    return found
