"""A draft model is refused where it does not fit the target, and its KV counts in the size of the pool."""

from __future__ import annotations

import pytest

from conch.api import ConfigError, EngineConfig, SamplingParams, SpeculativeConfig
from conch.engine.local import LocalEngine
from support.tiny import tiny_checkpoint

MIB = 1 << 20


def start(draft=None, target=None, **changes) -> LocalEngine:
    speculative = SpeculativeConfig(model=str(draft), num_speculative_tokens=3) if draft else None
    defaults = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "kv_cache_memory_bytes": MIB}
    model = str(target or tiny_checkpoint("llama"))
    return LocalEngine(EngineConfig(model=model, speculative_config=speculative, **{**defaults, **changes}))


def test_another_vocabulary_is_refused():
    with pytest.raises(ConfigError, match=r"vocabulary of 24 tokens.*320"):
        start(tiny_checkpoint("llama", vocab_size=24))


def test_one_that_looks_further_back_than_the_target_is_refused():
    sliding = tiny_checkpoint("mistral")
    with pytest.raises(ConfigError, match="looks further back"):
        start(tiny_checkpoint("llama"), target=sliding)
    with start(sliding, target=sliding) as engine:
        assert engine.info.num_blocks > 0


def test_its_kv_takes_its_share_of_the_memory():
    with start() as plain, start(tiny_checkpoint("llama")) as drafting:
        ratio = drafting.info.num_blocks / plain.info.num_blocks
        block_bytes = MIB / plain.info.num_blocks
    scratch = 8 * block_bytes / MIB  # a block for each request that may run
    assert ratio == pytest.approx((1 - scratch) / 2, abs=0.02)


def test_its_windows_give_up_blocks_with_the_targets():
    """Both slide: blocks that fall behind are given up, in the middle of drafting too."""
    sliding = tiny_checkpoint("mistral")
    prompts = [list(range(10 + index, 80 + index)) for index in range(4)]
    params = [SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)] * 4
    with start(target=sliding) as engine:
        plain = [answer.token_ids for (answer,) in engine.generate(prompts, params)]
    with start(sliding, target=sliding, num_gpu_blocks_override=20) as engine:
        drafted = [answer.token_ids for (answer,) in engine.generate(prompts, params)]
        stats = engine.stats()
    assert drafted == plain
    assert stats.drafts_accepted > 0.95 * stats.drafts_proposed > 0
