"""Experts divided among real ranks: the tokens of one, whatever is divided."""

from __future__ import annotations

import random
import shutil

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from conch.api import SpeculativeConfig
from conch.api.experts import EPLBConfig
from conch.engine.local import LocalEngine
from support.mesh import mesh_config, ranks
from support.oracle import Oracle, Same
from support.tiny import tiny_checkpoint
from support.traffic import mixed_prompts, staggered

VOCAB = 101


def check_same(family, tensor, expert, pipeline=1, budgets=(), **settings):
    """Serve mixed requests with chunked prefill, prefix caching, preemption and drafts."""
    folder = tiny_checkpoint(family, vocab_size=VOCAB)
    rng = random.Random(7)
    budgets = budgets or [rng.randint(4, 20) for _ in range(10)]
    prompts = mixed_prompts(rng, len(budgets), longest=60, vocab=VOCAB - 11)
    drafting = SpeculativeConfig(
        method="ngram", prompt_lookup_min=1, prompt_lookup_max=4, num_speculative_tokens=3, backoff=False
    )
    settings = {"num_gpu_blocks_override": 9, "speculative_config": drafting, **settings}
    config = mesh_config(folder, tensor, pipeline, expert_parallel_size=expert, **settings)
    with LocalEngine(config) as engine:
        assert len(ranks()) == tensor * expert * pipeline - 1
        answers = staggered(engine, prompts, budgets, at_once=8)
        again = staggered(engine, prompts[:1] * 2, [6, 6], at_once=1)
        stats = engine.stats()
    assert ranks() == []
    same = Same(Oracle(folder))
    for prompt, answer in zip([*prompts, *prompts[:1] * 2], [*answers, *again], strict=True):
        same.check(list(prompt), list(answer))
    same.finish()
    assert stats.preemptions > 0, "the pool was never short"
    assert stats.prefix_hits > 0
    assert stats.drafts_proposed > 0
    assert stats.kv_blocks_used == 0
    each = AutoConfig.from_pretrained(folder).num_experts_per_tok
    assert {sum(tokens) for tokens in stats.experts.tokens} == {each * stats.computed_tokens}
    return stats


def test_two_parts_of_experts():
    check_same("mixtral", 1, 2)


def test_two_tensor_ranks():
    check_same("qwen2_moe", 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(("tensor", "expert"), [(2, 1), (1, 2), (1, 4), (2, 2)])
def test_64_tokens_of_32_mixed_requests(family, tensor, expert):
    stats = check_same(
        family, tensor, expert, budgets=[64] * 32, num_gpu_blocks_override=24, max_num_batched_tokens=32
    )
    assert stats.generation_tokens == 64 * 32 + 2 * 6


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (2, 1), (1, 2)])
def test_stages_tell_rank_0_what_their_experts_did(tensor, expert):
    stats = check_same("deepseek_v3", tensor, expert, pipeline=2, num_gpu_blocks_override=6)
    assert stats.experts.layers == (1, 2), "the first layer has none"


@pytest.mark.slow
def test_windows_sinks_and_biases():
    check_same("gpt_oss", 1, 2)


@pytest.mark.slow
def test_blocks_that_were_parked_come_back_to_whoever_needs_them():
    stats = check_same(
        "mixtral", 1, 3, preemption_mode="swap", swap_space_bytes=1 << 20, prefix_host_bytes=1 << 20
    )
    assert stats.blocks_swapped_in > 0
    assert stats.prefix_host_hits > 0


def skewed(folder, tmp_path):
    """Copy a DeepSeek checkpoint, and make its first three experts so likely that all tokens choose them."""
    copy = shutil.copytree(folder, tmp_path / "skewed")
    (path,) = copy.glob("*.safetensors")
    weights = load_file(path)
    for name, bias in weights.items():
        if name.endswith("e_score_correction_bias"):
            bias[:3] += 10.0
    save_file(weights, path, metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_experts_move_to_where_there_is_room_and_the_tokens_stay(tmp_path, tensor):
    folder = skewed(tiny_checkpoint("deepseek_v3", vocab_size=VOCAB), tmp_path)
    eplb = EPLBConfig(num_redundant_experts=2, step_interval=40, window_size=30)
    config = mesh_config(
        folder, tensor, 1, expert_parallel_size=2, eplb_config=eplb, num_gpu_blocks_override=40
    )
    rng = random.Random(5)
    imbalance, served = [], []
    with LocalEngine(config) as engine:
        while len(served) < 12:
            prompts = mixed_prompts(rng, 2, longest=30, vocab=VOCAB)
            answers = staggered(engine, prompts, [10, 10], at_once=2)
            served += zip(prompts, answers, strict=True)
            imbalance.append(engine.stats().experts.imbalance)
        tokens = engine.stats().experts.tokens
    same = Same(Oracle(folder))
    for prompt, answer in served:
        same.check(list(prompt), list(answer))
    same.finish()
    assert all(not any(layer[3:]) and min(layer[:3]) > 0 for layer in tokens), "the load is skewed"
    assert imbalance[0] > 1.25
    assert imbalance[-1] < 1.1
