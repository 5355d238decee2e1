"""How many threads a rank computes with."""

from __future__ import annotations

import torch

from conch.api import EngineConfig
from conch.api.cores import share_of_cores


def threads_of(config: EngineConfig) -> int:
    """Return what the configuration asks for; by default the ranks of the engine's host divide its cores."""
    return config.num_threads or share_of_cores(config)


def use_threads(config: EngineConfig) -> None:
    """Have torch compute with so many."""
    torch.set_num_threads(threads_of(config))
