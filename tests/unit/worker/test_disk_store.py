"""Blocks in a file: what goes in comes out, nobody else can read it, and a full disk is no lie."""

from __future__ import annotations

import errno
import os
import stat

import pytest
import torch

from conch.api import Arena, ConfigError, Move
from conch.worker.arenas import Arenas, TensorStore
from conch.worker.disk_store import DiskStore

SLOTS = 6


def pools():
    """Layers of different shapes and dtypes, each block of its own content."""
    shapes = {torch.float32: (3, 4), torch.bfloat16: (2, 5), torch.int8: (7,)}
    return [
        torch.randint(-100, 100, (2, SLOTS, *shape), generator=torch.Generator().manual_seed(1)).to(dtype)
        for dtype, shape in shapes.items()
    ]


def block_bytes():
    return sum(pool[:, :1].nbytes for pool in pools())


def test_what_goes_to_the_disk_comes_back(tmp_path):
    own = pools()
    before = [pool.clone() for pool in own]
    disk = DiskStore(own, 4 * block_bytes() + 1, str(tmp_path))
    assert disk.num_slots == 4
    arenas = Arenas({Arena.DEVICE: TensorStore(own), Arena.DISK: disk})
    out = [Move(block, slot, target_arena=Arena.DISK) for block, slot in ((5, 3), (0, 0), (2, 1))]
    back = [Move(slot, block, source_arena=Arena.DISK) for block, slot in ((1, 3), (3, 0), (4, 1))]
    assert arenas.carry_out([*out, *back]) == ()
    for pool, old in zip(own, before, strict=True):
        assert torch.equal(pool[:, [1, 3, 4]], old[:, [5, 0, 2]])
        assert torch.equal(pool[:, [0, 2, 5]], old[:, [0, 2, 5]])
    arenas.close()


def test_the_file_is_private_bounded_and_goes(tmp_path):
    disk = DiskStore(pools(), 3 * block_bytes(), str(tmp_path))
    handle = disk._file.fileno()
    assert stat.S_IMODE(os.fstat(handle).st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [] and os.fstat(handle).st_nlink == 0
    disk.write([2, 0, 1], TensorStore(pools()).read([0, 1, 2]))
    assert os.fstat(handle).st_size == 3 * block_bytes()
    disk.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def test_a_full_disk_is_told_and_nothing_else_is_lost(tmp_path, monkeypatch):
    own = pools()
    before = [pool.clone() for pool in own]
    arenas = Arenas(
        {Arena.DEVICE: TensorStore(own), Arena.DISK: DiskStore(own, 9 * block_bytes(), str(tmp_path))}
    )

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    moves = [Move(0, 1), Move(2, 5, target_arena=Arena.DISK), Move(3, 4), Move(4, 0, target_arena=Arena.DISK)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert arenas.carry_out(moves) == (1, 3)
    for pool, old in zip(own, before, strict=True):
        assert torch.equal(pool[:, [1, 4]], old[:, [0, 3]])
    assert arenas.carry_out(moves) == ()


def test_a_disk_that_takes_a_little_at_a_time_gets_it_all(tmp_path, monkeypatch):
    write = os.pwrite
    disk = DiskStore(pools(), 9 * block_bytes(), str(tmp_path))
    monkeypatch.setattr(os, "pwrite", lambda handle, block, place: write(handle, block[:5], place))
    disk.write([1], TensorStore(pools()).read([4]))
    for part, pool in zip(disk.read([1]), pools(), strict=True):
        assert torch.equal(part, pool[:, [4]])


def test_what_was_never_written_is_no_content(tmp_path):
    disk = DiskStore(pools(), 9 * block_bytes(), str(tmp_path))
    with pytest.raises(OSError, match="cut short"):
        next(disk.read([7]))


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="prefix_disk_bytes"):
        DiskStore(pools(), block_bytes() - 1, str(tmp_path))
    with pytest.raises(ConfigError, match="prefix_disk_path"):
        DiskStore(pools(), 9 * block_bytes(), str(tmp_path / "missing"))
