"""Engines of several ranks, for tests."""

from __future__ import annotations

import psutil

from conch.api import EngineConfig


def mesh_config(folder, tensor, pipeline, **settings):
    """Return a configuration of small steps and a short pool."""
    defaults = {
        "dtype": "float32",
        "num_threads": 1,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "num_gpu_blocks_override": 12,
        "distributed_timeout_seconds": 600.0,  # a busy machine is no failure
    }
    return EngineConfig(
        model=str(folder),
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        **{**defaults, **settings},
    )


def ranks():
    """Return the rank processes of this one."""
    return [each for each in psutil.Process().children() if "conch.engine.rank" in " ".join(each.cmdline())]
