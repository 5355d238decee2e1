"""An arena in a file: bounded, private, and gone with the process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from conch.api import ConfigError


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's part of a slot: ``[2, 1, ...]``, `size` bytes from `start` on."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    size: int


class DiskStore:
    """Slots one behind the other in a file, each with the parts of all layers.

    The file has no name: nobody else can open it, and the system takes it away when the process ends, however
    it does. It grows as it is written.

    Parameters
    ----------
    pools
        What is stored: of each layer's pool a block.
    num_bytes
        Bound on the file.
    folder
        Where it lies; None is the system's place for temporary files.

    Raises
    ------
    ConfigError
        Not one block fits, or no file can be made.
    """

    def __init__(self, pools: Sequence[torch.Tensor], num_bytes: int, folder: str | None) -> None:
        self._layers: list[_Layer] = []
        start = 0
        for pool in pools:
            size = pool[:, :1].nbytes
            self._layers.append(_Layer((2, *pool.shape[2:]), pool.dtype, start, size))
            start += size
        self._slot_bytes = start
        if num_bytes < start:
            raise ConfigError(f"prefix_disk_bytes ({num_bytes}) holds no KV block: one takes {start} bytes")
        self._num_slots = num_bytes // start
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - open until `close`
        except OSError as error:
            raise ConfigError(
                f"prefix_disk_path: no file can be made in {folder!r}: {error.strerror}"
            ) from error

    @property
    def num_slots(self) -> int:
        """Blocks that fit."""
        return self._num_slots

    def read(self, slots: Sequence[int]) -> Iterator[torch.Tensor]:
        """Read the slots, then cut them into layers.

        Raises
        ------
        OSError
            The file does not have them.
        """
        content = torch.frombuffer(bytearray().join(map(self._read, slots)), dtype=torch.uint8)
        content = content.view(len(slots), self._slot_bytes)
        for layer in self._layers:
            part = content.new_empty(len(slots), layer.size)  # aligned as its dtype needs it
            part.copy_(content[:, layer.start : layer.start + layer.size])
            yield part.view(layer.dtype).view(len(slots), *layer.shape).transpose(0, 1)

    def write(self, slots: Sequence[int], layers: Iterator[torch.Tensor]) -> None:
        """Put the layers together and write the slots.

        Raises
        ------
        OSError
            The disk is full, or broken.
        """
        parts = [blocks.transpose(0, 1).contiguous().cpu().view(len(slots), -1) for blocks in layers]
        content = torch.cat([part.view(torch.uint8) for part in parts], 1).numpy()
        for slot, block in zip(slots, content, strict=True):
            self._write(slot, memoryview(block))

    def close(self) -> None:
        """Give the space back."""
        self._file.close()

    def _read(self, slot: int) -> bytes:
        block = os.pread(self._file.fileno(), self._slot_bytes, slot * self._slot_bytes)
        if len(block) < self._slot_bytes:
            raise OSError(f"cached KV on the disk is cut short: {len(block)} of {self._slot_bytes} bytes")
        return block

    def _write(self, slot: int, block: memoryview) -> None:
        place = slot * self._slot_bytes
        while block:
            count = os.pwrite(self._file.fileno(), block, place)
            if count == 0:
                raise OSError("the disk takes no more")
            block, place = block[count:], place + count
