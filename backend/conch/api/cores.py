"""Cores, and how engines and ranks of one host divide them."""

from __future__ import annotations

import os

from conch.api.config import EngineConfig
from conch.api.mesh_config import ranks_here


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share_of_cores(config: EngineConfig, engines: int = 1) -> int:
    """Return the cores of each rank on the engine's host, where `engines` like it divide them."""
    return max(1, usable_cores() // (engines * ranks_here(config)))
