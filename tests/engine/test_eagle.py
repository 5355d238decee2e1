"""Heads on hidden states: greedy answers stay transformers', whatever the head says, in every layout."""

from __future__ import annotations

import random
from functools import cache

import msgspec
import pytest

from conch.api import CheckpointError, ConfigError, EngineConfig, SamplingParams, SpeculativeConfig
from conch.engine.local import LocalEngine
from conch_plugins.drafters.eagle import EagleDrafter
from support.eagle import (
    eagle1_config,
    eagle1_tensors,
    eagle3_config,
    eagle3_tensors,
    knowing_tensors,
    memoryless_checkpoint,
    write_head,
)
from support.oracle import Oracle, Same
from support.tiny import tiny_checkpoint
from support.traffic import mixed_prompts, staggered


@cache
def oracle(target: str = "llama") -> Oracle:
    return Oracle(tiny_checkpoint("llama") if target == "llama" else memoryless())


@cache
def memoryless():
    """Return a model whose next token is a function of the last one alone."""
    return memoryless_checkpoint()


def head(layout: str) -> str:
    if layout == "eagle1":
        return str(write_head(eagle1_tensors(), eagle1_config()))
    if layout == "eagle3":
        return str(write_head(eagle3_tensors(), eagle3_config()))
    if layout == "eagle3_early":  # reads nothing that comes out of the last layer
        changes = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}, "norm_before_residual": True}
        return str(write_head(eagle3_tensors(), eagle3_config(**changes)))
    return str(write_head(knowing_tensors(), eagle1_config()))


def config(layout: str, **changes) -> EngineConfig:
    target = memoryless() if layout == "knowing" else tiny_checkpoint("llama")
    speculative = SpeculativeConfig(
        method="eagle", model=head(layout), num_speculative_tokens=3, backoff=False
    )
    defaults = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 16, "seed": 1}
    return EngineConfig(model=str(target), **{**defaults, "speculative_config": speculative, **changes})


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
@pytest.mark.parametrize("layout", ["eagle1", "eagle3", "eagle3_early", "knowing"])
@pytest.mark.parametrize(
    ("at_once", "changes"),
    [
        (1, {}),
        (16, {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 12}),
        (16, {"num_gpu_blocks_override": 12, "swap_space_bytes": 8 << 20}),
        (16, {"enable_prefix_caching": False, "num_gpu_blocks_override": 12}),
    ],
)
def test_greedy_answers_are_right(layout, kernel, at_once, changes):
    rng = random.Random(3)
    prompts = mixed_prompts(rng, 16, longest=100, vocab=200)
    budgets = [rng.randint(10, 50) for _ in prompts]
    same = Same(oracle("knowing" if layout == "knowing" else "llama"))
    with LocalEngine(config(layout, attention_kernel=kernel, **changes)) as engine:
        answers = staggered(engine, prompts, budgets, at_once)
        stats = engine.stats()
    same.check_all(prompts, budgets, answers)
    assert stats.drafts > 20 and stats.drafts_proposed > stats.drafts
    share = stats.drafts_accepted / stats.drafts_proposed
    assert share > 0.98 if layout == "knowing" else share < 0.1
    assert at_once == 1 or stats.preemptions > 0, "the pool was never short"
    assert stats.kv_blocks_used == 0


def test_int8_kv_and_choices():
    prompt = [7, 50, 60, 9] * 5 + [3]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, n=2)
    with LocalEngine(config("knowing", kv_cache_dtype="int8")) as engine:
        (choices,) = engine.generate([prompt], [params])
        stats = engine.stats()
    assert choices[0].token_ids == choices[1].token_ids
    assert stats.drafts_accepted == stats.drafts_proposed > 0


def test_a_pause_in_drafting_leaves_no_hole():
    """While others fill the batch nothing is drafted; afterwards it is as right as before."""
    settings = config("knowing").speculative_config
    paused = msgspec.structs.replace(settings, num_speculative_tokens_per_batch_size=((2, 64, 0),))
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    short = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    with LocalEngine(config("knowing", speculative_config=paused)) as engine:
        engine.generate([[5, 9, 100, 31], [8, 8]], [params, short])
        stats = engine.stats()
    assert stats.drafts_accepted == stats.drafts_proposed > 10


def test_what_was_put_off_is_as_if_it_had_not_been(monkeypatch):
    """Slots of steps without drafts are computed later: the same is drafted after them."""
    drafted: dict[int, tuple[int, ...]] = {}
    propose = EagleDrafter.propose

    def noted(self, context):
        found = propose(self, context)
        for tokens, drafts in zip(context.token_ids, found, strict=True):
            if len(context.request_ids) == 1:
                drafted[len(tokens)] = drafts
        return found

    monkeypatch.setattr(EagleDrafter, "propose", noted)
    paused = ((2, 64, 0),)
    seen = []
    for schedule in ((), paused):
        settings = config("eagle3").speculative_config
        settings = msgspec.structs.replace(settings, num_speculative_tokens_per_batch_size=schedule)
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        short = SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True)
        with LocalEngine(config("eagle3", speculative_config=settings)) as engine:
            engine.generate([[5, 9, 100, 31], [8, 8]], [params, short])
        seen.append(dict(drafted))
        drafted.clear()
    common = seen[0].keys() & seen[1].keys()
    assert len(common) > 25 and len({seen[1][length] for length in common}) > 5
    assert all(seen[0][length] == seen[1][length] for length in common)


WRONG = {
    "a matrix is missing": (lambda t, c: t.pop("fc.weight"), "fc.weight"),
    "a matrix has another shape": (
        lambda t, c: t.update({"fc.weight": t["fc.weight"][:, :50].contiguous()}),
        "fc.weight",
    ),
    "something is left over": (lambda t, c: t.update({"tower.weight": t["norm.weight"]}), "tower.weight"),
    "the map leaves the vocabulary": (lambda t, c: t.update({"d2t": t["d2t"] + 300}), "d2t"),
    "two layers": (lambda t, c: c.update(num_hidden_layers=2), "one layer"),
    "another hidden size": (lambda t, c: c.update(hidden_size=64), "hidden_size"),
    "no such layer": (
        lambda t, c: c.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 9]}),
        "eagle_aux_hidden_state_layer_ids",
    ),
    "strange positions": (lambda t, c: c.update(rope_scaling={"rope_type": "yarn"}), "yarn"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_head_is_refused(wrong):
    change, named = WRONG[wrong]
    tensors, said = eagle3_tensors(), eagle3_config()
    change(tensors, said)
    speculative = SpeculativeConfig(method="eagle", model=str(write_head(tensors, said)))
    with pytest.raises(CheckpointError, match=named):
        LocalEngine(config("eagle3", speculative_config=speculative))


@pytest.mark.parametrize(
    "keys", [{}, {"model": "x", "quantization": "int8"}, {"model": "x", "max_model_len": 9}]
)
def test_keys_that_say_nothing_to_a_head_are_refused(keys):
    with pytest.raises(ConfigError, match="eagle"):
        SpeculativeConfig(method="eagle", **keys)
