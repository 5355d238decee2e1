"""How many threads a rank computes with."""

from __future__ import annotations

import os

import torch

from conch.api import EngineConfig
from conch.api.mesh_config import shape_of


def threads_of(config: EngineConfig) -> int:
    """Return what the configuration asks for; by default the ranks of the engine's host divide its cores."""
    ranks = shape_of(config).size - config.remote_ranks
    return config.num_threads or max(1, _cores() // ranks)


def use_threads(config: EngineConfig) -> None:
    """Have torch compute with so many."""
    torch.set_num_threads(threads_of(config))


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
