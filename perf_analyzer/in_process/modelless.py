"""The engine as it is built for a model, but for the model: its worker answers at once.

Scheduler, KV manager, prefix cache and request table are the real ones, chosen by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import conch.engine.build as build
from conch.api import Arena, AttentionSpec, EngineConfig, ModelSpec, Row, RowResult, StepPlan, StepResult
from conch.api.config import parse_config
from conch.engine.build import build_engine
from conch.engine.core import Engine
from conch.worker import Prepared

VOCAB = 49_152
MODEL_LEN = 8_192

StepHook = Callable[[StepPlan], None]


class InstantWorker:
    """Samples a token for each row that wants one; the same row always brings the same token.

    Parameters
    ----------
    num_blocks
        KV blocks that it claims to have.
    on_step
        Called with each plan: what the step would have cost can be counted there.

    Attributes
    ----------
    seconds
        Spent in here so far: none of the engine's own.
    """

    def __init__(self, num_blocks: int, on_step: StepHook) -> None:
        self._num_blocks = num_blocks
        self._on_step = on_step
        self.seconds = 0.0

    @property
    def num_blocks(self) -> int:
        """KV blocks in the pool."""
        return self._num_blocks

    def num_slots(self, arena: Arena) -> int:
        """Have no memory but the pool."""
        return 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Do the step."""
        began = time.perf_counter()
        self._on_step(plan)
        result = StepResult(tuple(RowResult(row.request_id, sampled(row)) for row in plan.rows))
        self.seconds += time.perf_counter() - began
        return result

    def close(self) -> None:
        """Have nothing to free."""


def sampled(row: Row) -> tuple[int, ...]:
    """Return what a row brings; ids 0 and 1 never come."""
    if not row.samples:
        return ()
    return (2 + (row.request_id * 7_919 + (row.start + row.count) * 31) % (VOCAB - 2),)


def ignore(_: StepPlan) -> None:
    """Take no note of a step."""


def build_modelless(settings: dict[str, Any], on_step: StepHook = ignore) -> tuple[Engine, InstantWorker]:
    """Build an engine of keys of `model.json`, of which `num_gpu_blocks_override` has to be one."""
    config = parse_config({"model": "none", "attention_kernel": "torch", **settings})
    worker = InstantWorker(settings["num_gpu_blocks_override"], on_step)
    with (
        patch.object(build, "prepare", lambda config, progress: _no_model(config)),
        patch.object(build, "LocalWorker", lambda *_: worker),
    ):
        return build_engine(config, lambda stage, fraction: None).engine, worker


def _no_model(config: EngineConfig) -> Prepared:
    attention = AttentionSpec(9, 3, 64, 64, (None,), False, False, "bfloat16", "cpu", config.block_size)
    spec = ModelSpec("none", "none", VOCAB, config.max_model_len or MODEL_LEN, frozenset({0}), attention)
    return Prepared(config, SimpleNamespace(spec=spec, folder=Path()))
