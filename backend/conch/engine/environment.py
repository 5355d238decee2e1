"""What a process of the engine settles before it imports torch, and that import."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import sys

_NEEDED = ("conch.engine.build", "transformers.modeling_utils")
"""They import all that every model needs."""
_PR_SET_PDEATHSIG = 1


def settle_environment() -> None:
    """Let waiting compute threads sleep instead of spin; variables that the user has set are left alone.

    libgomp reads its policy when it is loaded. Its default is to spin at the end of each parallel region, and
    a model has hundreds of those a step. Where the cores are shared with anyone else, Triton for a start, a
    thread that lost its core keeps all others spinning, and a step takes ten times as long or more. Sleeping
    costs a few microseconds a region on an idle machine.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def import_what_is_needed() -> None:
    """Import torch, transformers and the engine, and keep the collector away from them for ever.

    That is a million objects. Going through them while they come takes a fifth of the import, and later
    each full collection would take 0.2 s.
    """
    gc.disable()
    try:
        for name in _NEEDED:
            importlib.import_module(name)
        gc.freeze()
    finally:
        gc.enable()
