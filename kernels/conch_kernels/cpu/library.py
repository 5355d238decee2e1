"""The compiled library in this process, and the team of threads that its functions run on."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from conch_kernels.cpu.build import BuildError, build


@functools.cache
def library(path: Path | None = None) -> ctypes.CDLL:
    """Return the library at `path`, or that for this machine, built first where that is needed.

    Raises
    ------
    BuildError
        It cannot be built or loaded here.
    """
    found = path or build()
    try:
        return ctypes.CDLL(str(found))
    except OSError as error:
        raise BuildError(f"the compiled kernels cannot be loaded: {error}") from error


def prefer_large_pages(memory: torch.Tensor, in_use: bool) -> None:
    """Ask the system to back a tensor with large pages, which it may or may not do.

    Parameters
    ----------
    memory
        What is read from end to end.
    in_use
        Whether it has been written to, and so has small pages already.
    """
    library().conch_prefer_large_pages(
        ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(memory.nbytes), in_use
    )


class Team:
    """Threads that go through native code together; the caller is one of them.

    Parameters
    ----------
    size
        Members.
    native
        The library that will be given it.
    """

    def __init__(self, size: int, native: ctypes.CDLL | None = None) -> None:
        self._native = native or library()
        self._native.conch_team_new.restype = ctypes.c_void_p
        self.size = size
        self.handle = ctypes.c_void_p(self._native.conch_team_new(size))

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._native.conch_team_free(self.handle)
            self.handle = ctypes.c_void_p()
