"""A GGUF file as it is stored: its metadata, and the bytes of each tensor."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from conch.api import CheckpointError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_COUNT: Final = _SCALARS[10]
_KIND: Final = _SCALARS[4]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the file.

    Attributes
    ----------
    kind
        Its number among the types of ggml.
    shape
        In torch's order, slowest first.
    offset
        Of its first byte, from the start of the file.
    """

    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int


class GgufFile:
    """Reads the header at once and tensors when they are asked for.

    Attributes
    ----------
    metadata
        Every key with its value.
    tensors
        By their names in the file, in its order.

    Raises
    ------
    CheckpointError
        The file cannot be read, or is not GGUF.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            header = _Header(self._bytes)
            self.metadata: dict[str, Any] = header.metadata
            self.tensors = {tensor.name: tensor for tensor in header.tensors}
        except (ValueError, TypeError, OSError, LookupError, struct.error) as error:
            raise CheckpointError(f"{path} is not a readable GGUF file: {error}") from error
        self.path = path

    def bytes_of(self, tensor: StoredTensor, count: int) -> torch.Tensor:
        """Return `count` bytes of a tensor, still those of the file: uint8 [count], not to be written.

        Raises
        ------
        CheckpointError
            The file ends before.
        """
        if tensor.offset + count > len(self._bytes):
            raise CheckpointError(f"{self.path} ends within {tensor.name}")
        return torch.frombuffer(self._bytes, dtype=torch.uint8, count=count, offset=tensor.offset)


class _Header:
    """Walks the header once, from front to back."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        if data[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._scalar(_KIND)
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, not {' or '.join(map(str, _VERSIONS))}")
        num_tensors, num_keys = self._scalar(_COUNT), self._scalar(_COUNT)
        self.metadata = dict(self._pair() for _ in range(num_keys))
        tensors = [self._tensor() for _ in range(num_tensors)]
        alignment = int(self.metadata.get("general.alignment", 32))
        if alignment < 1:
            raise ValueError(f"its alignment is {alignment}")
        begin = -(-self._at // alignment) * alignment
        self.tensors = [replace(tensor, offset=begin + tensor.offset) for tensor in tensors]

    def _scalar(self, layout: struct.Struct) -> Any:  # noqa: ANN401 - what the layout says
        (value,) = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return value

    def _string(self) -> str:
        length = self._scalar(_COUNT)
        begin, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise ValueError("it ends within a text")
        return self._data[begin : self._at].decode("utf-8")

    def _pair(self) -> tuple[str, Any]:
        return self._string(), self._value(self._scalar(_KIND))

    def _value(self, kind: int) -> Any:  # noqa: ANN401 - what the file says
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        kind, count = self._scalar(_KIND), self._scalar(_COUNT)
        if kind == _ARRAY:
            raise ValueError("it has arrays in arrays")
        if kind not in _SCALARS:
            return [self._value(kind) for _ in range(count)]
        layout = _SCALARS[kind]
        begin, self._at = self._at, self._at + count * layout.size
        if self._at > len(self._data):
            raise ValueError("it ends within an array")
        return [value for (value,) in layout.iter_unpack(self._data[begin : self._at])]

    def _tensor(self) -> StoredTensor:
        """Read one entry of the table; its offset is still that from where the tensors begin."""
        name = self._string()
        rank = self._scalar(_KIND)
        shape = tuple(self._scalar(_COUNT) for _ in range(rank))[::-1]
        if 0 in shape:
            raise ValueError(f"{name} has no elements")
        kind = self._scalar(_KIND)
        return StoredTensor(name, kind, shape, self._scalar(_COUNT))
