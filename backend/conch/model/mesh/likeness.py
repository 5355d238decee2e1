"""Whether ranks of several hosts have the same checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from conch.api import CheckpointError
from conch.api.mesh import Meeting, Seat
from conch.model.checkpoint import open_weights

_SAMPLES = 16
_NOT_COMPARED = {"_name_or_path", "transformers_version"}
_KEY = "likeness"


class Likeness(msgspec.Struct, frozen=True):
    """Digests of a checkpoint, which do not depend on where it lies or how it is divided into files.

    Attributes
    ----------
    config
        Of config.json.
    parameters
        Of the names, shapes and types of all parameters.
    weights
        Of the first row of some of them.
    """

    config: str
    parameters: str
    weights: str

    @classmethod
    def of(cls, folder: Path) -> Likeness:
        """Look at a checkpoint in Hugging Face layout."""
        config = json.loads((folder / "config.json").read_text())
        compared = {key: value for key, value in config.items() if key not in _NOT_COMPARED}
        with ExitStack() as stack:
            tensors = _tensors(folder, stack)
            shapes = [
                (name, tensor.get_shape(), tensor.get_dtype()) for name, tensor in sorted(tensors.items())
            ]
            names = sorted(name for name, shape, _ in shapes if shape)
            sampled = names[:: -(-len(names) // _SAMPLES) or 1]
            rows = [_bytes(tensors[name][:1]) for name in sampled]
        return cls(
            _digest([json.dumps(compared, sort_keys=True).encode()]),
            _digest([repr(shapes).encode()]),
            _digest(rows),
        )

    def differences(self, other: Likeness) -> list[str]:
        """Say what two checkpoints do not share, for people to read."""
        parts = {
            "config.json": self.config == other.config,
            "the names, shapes or types of parameters": self.parameters == other.parameters,
            "weights": self.weights == other.weights,
        }
        return [part for part, is_same in parts.items() if not is_same]


def check_alike(folder: Path, seat: Seat, meeting: Meeting) -> None:
    """Compare this rank's checkpoint with that of rank 0, which tells all others what it has.

    Raises
    ------
    CheckpointError
        They differ.
    """
    own = Likeness.of(folder)
    if seat.rank == 0:
        meeting.post(_KEY, msgspec.msgpack.encode(own))
        return
    truth = msgspec.msgpack.decode(meeting.read(_KEY, seat.timeout_s), type=Likeness)
    differences = own.differences(truth)
    if differences:
        raise CheckpointError(f"{folder} is not the checkpoint of rank 0: other {' and '.join(differences)}")


def _tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in open_weights(folder, stack):
        found.update((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118 - not a mapping
    return found


def _bytes(row: Any) -> bytes:  # noqa: ANN401 - a tensor of any type, numpy has not all of them
    import torch

    return bytes(row.contiguous().view(-1).view(torch.uint8).numpy())


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
