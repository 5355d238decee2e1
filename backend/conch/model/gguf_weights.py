"""The weights of a GGUF file under the names that transformers gives them, as stored or as floats."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from conch.api import CheckpointError
from conch.model.gguf_file import GgufFile, StoredTensor
from conch_kernels.cpu.quantising import FORMAT_OF_KIND

_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTSIDE: Final = re.compile(r"(\w+)\.(weight|bias)")

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
"""Those whose tensors have these names and are stored as they are, but for the order of rows in llama's."""

GROUPED_KINDS: Final = tuple(FORMAT_OF_KIND)
"""Kinds that can be served as they are stored."""


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """A quantised matrix as the file has it, its rows in the order of transformers.

    Attributes
    ----------
    kind
        One of `GROUPED_KINDS`.
    blocks
        uint8 [columns, bytes of a row].
    """

    kind: str
    blocks: torch.Tensor


class GgufWeights:
    """The weights of one file.

    Parameters
    ----------
    file
        Of one of the `ARCHITECTURES`.

    Raises
    ------
    CheckpointError
        The architecture is another, or the file has a tensor that has no name here.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._architecture = file.metadata.get("general.architecture")
        if self._architecture not in ARCHITECTURES:
            raise CheckpointError(f"the architecture {self._architecture!r} is not among {ARCHITECTURES}")
        self._tensors = {_name_of(name): tensor for name, tensor in file.tensors.items()}

    def names(self) -> tuple[str, ...]:
        """Return the names of all weights, as transformers knows them."""
        return tuple(self._tensors)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def kind(self, name: str) -> str | None:
        """Return the kind of a matrix; None where it is not among `GROUPED_KINDS`."""
        tensor = self._tensors[name]
        kind = _kind_name(tensor)
        return kind if kind in GROUPED_KINDS and len(tensor.shape) == 2 else None

    def raw(self, name: str) -> RawTensor | None:
        """Return a matrix as it is stored; None where its kind is not among `GROUPED_KINDS`."""
        tensor, kind = self._tensors[name], self.kind(name)
        if kind is None:
            return None
        blocks = self._bytes(tensor).view(tensor.shape[0], -1)
        return RawTensor(kind, self._in_order(tensor, blocks))

    def dense(self, name: str) -> torch.Tensor:
        """Return a weight as float32, in memory of its own."""
        import gguf

        tensor = self._tensors[name]
        data = self._bytes(tensor)
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        blocks = data.view(_rows_at_once(rows), -1).numpy()
        try:
            values = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType(tensor.kind)))
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self._file.path}: {tensor.name} is {_kind_name(tensor)}: {error}"
            ) from error
        ordered = self._in_order(tensor, values.view(tensor.shape))
        return ordered.clone() if ordered.data_ptr() == data.data_ptr() else ordered

    def _bytes(self, tensor: StoredTensor) -> torch.Tensor:
        import gguf

        per_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.kind)]
        count = 1
        for size in tensor.shape:
            count *= size
        return self._file.bytes_of(tensor, count // per_block * block_bytes)

    def _in_order(self, tensor: StoredTensor, rows: torch.Tensor) -> torch.Tensor:
        """Put the rows of queries and keys back: in files of llama the halves of a head are interleaved."""
        key = _HEADS.get(_leaf(tensor.name)) if self._architecture == "llama" else None
        if key is None:
            return rows
        metadata: Mapping[str, int] = self._file.metadata
        heads = metadata.get(f"llama.{key}", metadata["llama.attention.head_count"])
        pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)


_HEADS: Final = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
_MAX_CHUNKS: Final = 64


def _rows_at_once(rows: int) -> int:
    """Into how many pieces to cut `rows` rows, for few calls that are not too large."""
    return next(pieces for pieces in range(min(rows, _MAX_CHUNKS), 0, -1) if rows % pieces == 0)


def _leaf(name: str) -> str:
    return name.split(".")[-2]


def _name_of(stored: str) -> str:
    inside, outside = _IN_LAYER.fullmatch(stored), _OUTSIDE.fullmatch(stored)
    if inside and inside[2] in _LAYER_NAMES:
        return f"model.layers.{inside[1]}.{_LAYER_NAMES[inside[2]]}.{inside[3]}"
    if outside and outside[1] in _NAMES:
        return f"{_NAMES[outside[1]]}.{outside[2]}"
    raise CheckpointError(f"the tensor {stored} of the GGUF file has no name in transformers")


def _kind_name(tensor: StoredTensor) -> str:
    import gguf

    return str(gguf.GGMLQuantizationType(tensor.kind).name)
