"""The tensors of a checkpoint, read slice by slice, under whatever names and cuts it has them.

transformers keeps the experts of a layer in one stack, many checkpoints each by itself; what is which is told
by transformers' own conversions, of which those are understood that stack matrices and put them one below
another.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any

import torch

from conch.api import CheckpointError
from conch.model.checkpoint import open_weights
from conch.model.describe import Description
from conch.model.mesh.source import Source
from conch.model.mesh.split import Range

_STACKS = [["MergeModulelist"], ["MergeModulelist", "Concatenate"]]


class Stored:
    """A checkpoint, none of whose tensors has been read yet.

    Parameters
    ----------
    description
        The model.
    stack
        Closes its files.

    Raises
    ------
    CheckpointError
        It holds a tensor that the model lacks, or under a name that is not understood.
    """

    def __init__(self, description: Description, stack: ExitStack) -> None:
        self._folder = description.folder
        names = _Names(description)
        self._whole: dict[str, tuple[Any, str]] = {}
        self._pieces: dict[str, dict[tuple[int, int], tuple[Any, str]]] = {}
        for file in open_weights(self._folder, stack):
            for name in file.keys():  # noqa: SIM118 - not a mapping
                self._take(names, file, name)

    def has(self, name: str) -> bool:
        """Whether a parameter is there."""
        return name in self._whole or name in self._pieces

    def read(self, source: Source) -> torch.Tensor:
        """Read what a source takes of a parameter, into memory of its own.

        Raises
        ------
        CheckpointError
            It is not there, or of another shape.
        """
        if source.name in self._whole:
            file, name = self._whole[source.name]
            return _read(
                self._slice(file, name, source.shape),
                [source.ranges(dim) for dim in range(len(source.shape))],
            )
        if source.name not in self._pieces:
            self._lacks(source.name)
        return torch.stack(
            [
                self._read_entry(source, index)
                for first, last in source.ranges(0)
                for index in range(first, last)
            ]
        )

    def _read_entry(self, source: Source, index: int) -> torch.Tensor:
        """Read one entry of a stack, which may lie there in several matrices, one below another."""
        pieces = self._pieces[source.name]
        count = 1 + max(piece for _, piece in pieces)
        rows, columns = source.shape[1] // count, source.shape[2]
        read = []
        for first, last in source.ranges(1):
            while first < last:
                piece, start = divmod(first, rows)
                until = min(last, (piece + 1) * rows)
                file, name = pieces.get((index, piece)) or self._lacks(f"{source.name}, entry {index}")
                stored = self._slice(file, name, (rows, columns))
                read.append(_read(stored, [((start, start + until - first),), source.ranges(2)]))
                first = until
        return torch.cat(read)

    def _slice(self, file: Any, name: str, shape: tuple[int, ...]) -> Any:  # noqa: ANN401 - safetensors' own
        stored = file.get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise CheckpointError(
                f"{self._folder} holds parameter {name} in another shape than its config says"
            )
        return stored

    def _lacks(self, name: str) -> Any:  # noqa: ANN401
        raise CheckpointError(f"{self._folder} lacks parameter {name}")

    def _take(self, names: _Names, file: Any, name: str) -> None:  # noqa: ANN401
        found = names.find(name)
        if found is None:
            return
        target, place = found
        if place is None:
            self._whole[target] = (file, name)
        else:
            self._pieces.setdefault(target, {})[place] = (file, name)


class _Names:
    """From a checkpoint's names to transformers'."""

    def __init__(self, description: Description) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        meta = description.meta
        self._folder, self._known = description.folder, meta.state_dict()
        self._ignored = [*(meta._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
        transforms = get_model_conversion_mapping(meta, add_legacy=False)
        self._converters = [each for each in transforms if hasattr(each, "operations")]
        self._renamings = [each for each in transforms if not hasattr(each, "operations")]

    def find(self, name: str) -> tuple[str, tuple[int, int] | None] | None:
        """Return the parameter that a tensor is, or which matrix of which entry of one; None to ignore it."""
        if name in self._known:
            return name, None
        renamed = name
        for renaming in self._renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        if renamed in self._known:
            return renamed, None
        for converter in self._converters:
            target, pattern = converter.rename_source_key(renamed)
            if pattern is not None and target in self._known and self._is_stack(converter):
                index = re.search(r"(\d+)".join(map(re.escape, pattern.split("*"))), renamed)
                if index and int(index[1]) < self._known[target].shape[0]:
                    return target, (int(index[1]), converter.source_patterns.index(pattern))
        if any(re.search(pattern, name) for pattern in self._ignored):
            return None
        raise CheckpointError(
            f"{self._folder} holds parameter {name}, which the model lacks, or several ranks cannot read"
        )

    @staticmethod
    def _is_stack(converter: Any) -> bool:  # noqa: ANN401 - transformers is not typed
        kinds = [type(operation).__name__ for operation in converter.operations]
        dims = [getattr(operation, "dim", None) for operation in converter.operations]
        return kinds in _STACKS and dims == [0, 1][: len(dims)]


def _read(stored: Any, ranges: list[tuple[Range, ...]]) -> torch.Tensor:  # noqa: ANN401 - a slice of safetensors
    """Read ranges of each dimension, put together again, into memory of its own."""
    if all(len(own) == 1 for own in ranges):
        read: torch.Tensor = stored[tuple(slice(*own[0]) for own in ranges)]
        return read.clone()
    dim = next(dim for dim, own in enumerate(ranges) if len(own) > 1)
    parts = [_read(stored, [*ranges[:dim], (own,), *ranges[dim + 1 :]]) for own in ranges[dim]]
    return torch.cat(parts, dim=dim)
