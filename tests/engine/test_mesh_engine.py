"""Real ranks: the tokens of one, whatever is divided; and no rank outlives a failure."""

from __future__ import annotations

import os
import random
import signal

import pytest

from conch.api import ConfigError, SamplingParams, SpeculativeConfig
from conch.api.mesh import MeshError
from conch.engine.local import LocalEngine
from support.mesh import mesh_config, ranks
from support.oracle import Oracle, Same
from support.tiny import tiny_checkpoint
from support.traffic import mixed_prompts, staggered


def check_same(folder, tensor, pipeline, vocab=90, **settings):
    rng = random.Random(f"{tensor} {pipeline}")
    prompts = mixed_prompts(rng, 10, longest=60, vocab=vocab)
    budgets = [rng.randint(4, 20) for _ in prompts]
    with LocalEngine(mesh_config(folder, tensor, pipeline, **settings)) as engine:
        assert len(ranks()) == tensor * pipeline - 1
        answers = staggered(engine, prompts, budgets, at_once=8)
        again = staggered(engine, prompts[:1], [6], at_once=1)
        stats = engine.stats()
    assert ranks() == []
    same = Same(Oracle(folder))
    for prompt, answer in zip([*prompts, prompts[0]], [*answers, *again], strict=True):
        same.check(list(prompt), list(answer))
    same.finish()
    assert stats.preemptions > 0, "the pool was never short"
    assert stats.prefix_hits > 0
    assert stats.kv_blocks_used == 0
    assert len(stats.stages_s) == (pipeline if pipeline > 1 else 0)
    assert all(0 < seconds < stats.steps_s for seconds in stats.stages_s)


def test_two_stages_with_drafts():
    drafting = SpeculativeConfig(method="ngram")
    check_same(tiny_checkpoint("qwen3"), 1, 2, speculative_config=drafting)


@pytest.mark.slow
def test_tensor_and_pipeline_with_drafts():
    drafting = SpeculativeConfig(method="ngram")
    check_same(tiny_checkpoint("qwen3"), 2, 2, speculative_config=drafting)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "vocab", "tensor", "pipeline", "is_tied"),
    [
        ((9, 3), 101, 3, 1, True),
        ((8, 2), 103, 2, 1, False),
        ((8, 2), 101, 4, 1, True),
        ((6, 1), 103, 3, 1, False),
        ((6, 1), 101, 2, 2, True),
        ((5, 5), 103, 1, 2, True),
        ((5, 5), 101, 1, 3, False),
    ],
)
def test_odd_heads_and_vocabularies(heads, vocab, tensor, pipeline, is_tied):
    folder = tiny_checkpoint(
        "llama",
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=8,
        hidden_size=8 * heads[0],
        vocab_size=vocab,
        num_hidden_layers=3,
        tie_word_embeddings=is_tied,
    )
    check_same(folder, tensor, pipeline)


@pytest.mark.slow
def test_stages_of_wished_layers():
    check_same(tiny_checkpoint("llama", num_hidden_layers=4), 1, 3, pipeline_layers=(1, 2, 1))


@pytest.mark.parametrize(("heads", "tensor"), [((9, 3), 2), ((5, 5), 2), ((6, 1), 4), ((12, 3), 2)])
def test_heads_that_cannot_be_divided_are_refused_at_start(heads, tensor):
    folder = tiny_checkpoint(
        "llama",
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=8,
        hidden_size=8 * heads[0],
    )
    named = f"tensor_parallel_size {tensor} cannot divide {heads[0]} query heads and {heads[1]} KV heads"
    with pytest.raises(ConfigError, match=named):
        LocalEngine(mesh_config(folder, tensor, 1))
    assert ranks() == []


def test_a_killed_rank_ends_the_step_and_is_named():
    with LocalEngine(mesh_config(tiny_checkpoint("llama"), 2, 1)) as engine:
        engine.add([5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True))
        engine.step()
        (rank,) = ranks()
        os.kill(rank.pid, signal.SIGKILL)
        with pytest.raises(MeshError, match=r"rank 1 of the mesh \(process \d+\) was killed by signal 9"):
            for _ in range(3):
                engine.step()
    assert ranks() == []


def test_unserved_combinations_are_refused():
    folder = tiny_checkpoint("llama")
    for settings, key in (
        ({"parallelism": "single"}, "parallelism"),
        ({"model_impl": "fused"}, "model_impl"),
        ({"quantization": "int8"}, "quantization"),
        ({"prefix_disk_bytes": 1 << 20}, "prefix_disk_bytes"),
    ):
        with pytest.raises(ConfigError, match=key):
            mesh_config(folder, 2, 1, **settings)
