"""Lower tiers of the prefix cache over a tiny checkpoint: the answers stay those of transformers."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from conch.api import ConfigError, EngineConfig, SamplingParams
from conch.api.config import parse_config
from conch.engine.local import LocalEngine
from support.oracle import Oracle, Same
from support.tiny import tiny_checkpoint

BLOCK, POOL = 16, 12
BLOCK_BYTES = 2 * 2 * 2 * BLOCK * 12 * 4
"""Two layers of keys and values, two heads of 12 numbers."""


def checkpoint() -> Path:
    return tiny_checkpoint("llama")


@cache
def oracle() -> Oracle:
    return Oracle(checkpoint())


@contextmanager
def engine_with(**settings) -> Iterator[LocalEngine]:
    defaults = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 4, "num_gpu_blocks_override": POOL}
    with LocalEngine(EngineConfig(model=str(checkpoint()), **{**defaults, "seed": 1, **settings})) as engine:
        yield engine
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)


def chats(seed: int, count: int = 6, turns: int = 4) -> list[list[int]]:
    """Return prompts of conversations that take turns: each is the one before, and more."""
    rng = random.Random(seed)
    system = [rng.randrange(3, 320) for _ in range(37)]
    talks = [[*system, *(rng.randrange(3, 320) for _ in range(10))] for _ in range(count)]
    prompts = []
    for _ in range(turns):
        for talk in talks:
            talk += [rng.randrange(3, 320) for _ in range(rng.randint(5, 25))]
            prompts.append(list(talk))
    return prompts


def serve_and_check(engine: LocalEngine, prompts: list[list[int]]) -> None:
    same = Same(oracle())
    for prompt in prompts:
        answer = [
            token
            for output in engine.stream(
                prompt, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            )
            for token in output.token_ids
        ]
        assert len(answer) == 4
        same.check(prompt, answer)
    same.finish()


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
@pytest.mark.parametrize("name", ["hash", "radix"])
def test_what_comes_back_from_memory_and_disk_changes_no_answer(name, kernel, tmp_path):
    tiers = {
        "prefix_host_bytes": 10 * BLOCK_BYTES,
        "prefix_disk_bytes": 60 * BLOCK_BYTES,
        "prefix_disk_path": str(tmp_path),
    }
    prompts = chats(1)
    with engine_with(prefix_cache=name, attention_kernel=kernel, **tiers) as engine:
        serve_and_check(engine, prompts)
        stats = engine.stats()
        assert stats.prefix_host_hits > 0 and stats.prefix_disk_hits > 0
        assert 0 < stats.prefix_host_blocks <= 10 and 0 < stats.prefix_disk_blocks <= 60
        assert list(tmp_path.iterdir()) == []
    with engine_with(prefix_cache=name, attention_kernel=kernel) as engine:
        serve_and_check(engine, prompts)
        alone = engine.stats()
        assert alone.prefix_host_hits == alone.prefix_disk_hits == alone.prefix_disk_blocks == 0
    assert stats.prefix_hits > alone.prefix_hits + 200


@pytest.mark.parametrize("name", ["hash", "radix"])
def test_a_full_disk_costs_hits_and_no_answer(name, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with engine_with(prefix_cache=name, prefix_disk_bytes=60 * BLOCK_BYTES) as engine:
        monkeypatch.setattr(os, "pwrite", full)
        serve_and_check(engine, chats(2))
        stats = engine.stats()
        assert stats.prefix_disk_hits == stats.prefix_disk_blocks == 0
        monkeypatch.undo()
        serve_and_check(engine, chats(2))
        assert engine.stats().prefix_disk_hits > 0


@pytest.mark.parametrize("name", ["hash", "radix"])
def test_many_at_once_with_preemptions_and_tiers(name):
    tiers = {"prefix_host_bytes": 8 * BLOCK_BYTES, "prefix_disk_bytes": 40 * BLOCK_BYTES}
    prompts = chats(3, count=5, turns=3)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with engine_with(prefix_cache=name, swap_space_bytes=6 * BLOCK_BYTES, **tiers) as engine:
        same = Same(oracle())
        for start in range(0, len(prompts), 5):
            batch = prompts[start : start + 5]
            for prompt, (answer,) in zip(batch, engine.generate(batch, [params] * len(batch)), strict=True):
                same.check(prompt, list(answer.token_ids))
        same.finish()
        stats = engine.stats()
        assert stats.preemptions > 0 and stats.prefix_host_hits + stats.prefix_disk_hits > 0


def test_tenants_share_no_tier():
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    prompt = chats(4)[0]
    with engine_with(prefix_host_bytes=60 * BLOCK_BYTES) as engine:
        cached = []
        for salt in ("a", "b", "c", "d", "a"):
            engine.add(prompt, params, cache_salt=salt)
            while engine.has_work:
                cached += [output.usage.num_cached for output in engine.step() if output.usage]
        assert cached[:4] == [0, 0, 0, 0] and cached[4] > 0
        assert engine.stats().prefix_host_hits > 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"prefix_host_bytes": -1}, "prefix_host_bytes"),
        ({"prefix_disk_bytes": -1}, "prefix_disk_bytes"),
        ({"prefix_host_bytes": 1 << 20, "enable_prefix_caching": False}, "without a prefix cache"),
        ({"prefix_disk_bytes": 1 << 20, "prefix_cache": "none"}, "without a prefix cache"),
        ({"prefix_disk_path": "/tmp"}, "without prefix_disk_bytes"),
    ],
)
def test_a_wrong_configuration_is_refused(settings, named):
    with pytest.raises(ConfigError, match=named):
        parse_config({"model": "m", **settings})


@pytest.mark.parametrize("key", ["prefix_host_bytes", "prefix_disk_bytes"])
def test_a_tier_that_holds_no_block_is_refused(key):
    with pytest.raises(ConfigError, match=key):
        LocalEngine(EngineConfig(model=str(checkpoint()), num_gpu_blocks_override=POOL, **{key: 100}))
