"""Engines that a test has started itself; servers that a whole session shares have others."""

from __future__ import annotations

import contextlib

import psutil


def own_engines() -> list[psutil.Process]:
    """Return engines that are children of this process, and all that descends from them."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and "conch.engine" in child.cmdline():
                found += [child, *child.children(recursive=True)]
    return found
