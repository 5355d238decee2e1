"""An engine with int8 KV: shared, copied, evicted and computed again, its answers stay near the truth."""

from __future__ import annotations

import random

import pytest

from conch.api import EngineConfig, SamplingParams
from conch.engine.local import LocalEngine
from support.oracle import Oracle
from support.tiny import tiny_checkpoint
from support.traffic import mixed_prompts, staggered

NEAR = 0.05
"""How far below the largest logit that of a chosen token may be; the largest is some 10 above the median."""


def config_of(family="llama", **settings):
    defaults = {"dtype": "float32", "num_threads": 1, "kv_cache_dtype": "int8", "max_num_seqs": 12}
    return EngineConfig(model=str(tiny_checkpoint(family)), **{**defaults, **settings})


def check_near(oracle, prompt, answer):
    logits = oracle.logits([*prompt, *answer])[len(prompt) - 1 : -1]
    for row, token in zip(logits, answer, strict=True):
        assert float(row.max() - row[token]) < NEAR
        assert float(row.max() - row.median()) > 20 * NEAR  # a wrong token would not pass


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_a_short_pool_with_shared_beginnings(family):
    config = config_of(family, num_gpu_blocks_override=12, max_num_batched_tokens=16)
    rng = random.Random(family)
    prompts = mixed_prompts(rng, 12, longest=100, vocab=200)
    with LocalEngine(config) as engine:
        answers = staggered(engine, prompts, [20] * 12, at_once=12)
        stats = engine.stats()
    assert stats.preemptions > 0 and stats.prefix_hits > 0
    oracle = Oracle(tiny_checkpoint(family))
    for prompt, answer in zip(prompts, answers, strict=True):
        check_near(oracle, prompt, answer)


def test_a_prompt_found_in_the_cache_gives_the_same_answer():
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompt = [5 + 37 * i % 190 for i in range(70)]
    with LocalEngine(config_of(num_gpu_blocks_override=40)) as engine:
        ((first,),) = engine.generate([prompt], [params])
        assert engine.stats().prefix_hits == 0
        ((again,),) = engine.generate([prompt], [params])
        assert engine.stats().prefix_hits > 0
    assert again.token_ids == first.token_ids


def test_choices_of_one_prompt_do_not_disturb_each_other():
    """They share the prompt's blocks and part in a copy of the last one."""
    prompt = [5 + 37 * i % 190 for i in range(20)]
    hot = SamplingParams(temperature=3.0, max_tokens=12, ignore_eos=True, seed=1, n=3)
    cold = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LocalEngine(config_of(num_gpu_blocks_override=40)) as engine:
        (choices, (alone,)) = engine.generate([prompt, prompt], [hot, cold])
    assert len({choice.token_ids for choice in choices}) == 3
    check_near(Oracle(tiny_checkpoint("llama")), prompt, alone.token_ids)
    with LocalEngine(config_of(num_gpu_blocks_override=40, max_num_seqs=1)) as engine:
        ((calm,),) = engine.generate([prompt], [cold])
    assert alone.token_ids == calm.token_ids
