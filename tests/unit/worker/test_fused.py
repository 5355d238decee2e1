"""The fused decoder equals transformers, for one tiny model of each family that it knows."""

from __future__ import annotations

import pytest

from conch.api import ConfigError
from conch.model.causal_model import CausalModel
from conch.model.fused.decoder import FusedDecoder
from support.tiny import FAMILIES, tiny_checkpoint
from support.worker_driver import Driver, build_worker
from unit.worker.test_families import LENGTHS, ROPES, check, greedy_jobs

FUSED = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "granite",
    "olmo2",
    "olmo3",
    "smollm3",
]


def fused_worker(folder, **settings):
    worker = build_worker(
        folder, **{"attention_kernel": "cpu", "model_impl": "fused", "num_threads": 2, **settings}
    )
    assert isinstance(worker._model, FusedDecoder)
    return worker


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("family", FUSED)
def test_equals_transformers(family, block_size):
    folder = tiny_checkpoint(family)
    jobs = greedy_jobs(LENGTHS)
    worker = fused_worker(folder, block_size=block_size)
    Driver(worker).run(jobs, chunk=7, stagger=2)
    check(folder, jobs)


@pytest.mark.parametrize("chunk", [1, 16, 1000])
@pytest.mark.parametrize("threads", [1, 3])
def test_chunks_and_threads(chunk, threads):
    folder = tiny_checkpoint("mistral")
    jobs = greedy_jobs(LENGTHS)
    Driver(fused_worker(folder, num_threads=threads)).run(jobs, chunk=chunk)
    check(folder, jobs)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_rope_scalings(rope):
    folder = tiny_checkpoint("llama", rope_parameters={"rope_theta": 10000.0, **rope})
    jobs = greedy_jobs([5, 150, 90])
    Driver(fused_worker(folder)).run(jobs, chunk=32)
    check(folder, jobs)


@pytest.mark.parametrize(
    "changes", [{"tie_word_embeddings": True}, {"attention_bias": True}, {"vocab_size": 333}]
)
def test_what_llama_may_have(changes):
    folder = tiny_checkpoint("llama", **changes)
    jobs = greedy_jobs([3, 20])
    Driver(fused_worker(folder)).run(jobs, chunk=8)
    check(folder, jobs)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(FUSED)))
def test_other_families_run_with_their_own_modules(family):
    folder = tiny_checkpoint(family)
    worker = build_worker(folder, attention_kernel="cpu")
    assert isinstance(worker._model, CausalModel)
    with pytest.raises(ConfigError, match="model_impl 'fused' cannot serve"):
        build_worker(folder, attention_kernel="cpu", model_impl="fused")


UNREAD = {
    "llama": {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "final_logit_softcapping": 5.0},
    "gemma3_text": {"attn_logit_softcapping": 2.0},
    "gemma2": {"hidden_act": "relu"},
}


@pytest.mark.parametrize("family", UNREAD)
def test_keys_that_the_family_does_not_read_change_nothing(family):
    folder = tiny_checkpoint(family, **UNREAD[family])
    jobs = greedy_jobs([3, 20])
    Driver(fused_worker(folder)).run(jobs, chunk=8)
    check(folder, jobs)


def test_a_class_that_is_not_of_transformers_is_not_taken_for_one(monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "__module__", "remote_code")
    worker = build_worker(tiny_checkpoint("llama"), attention_kernel="cpu")
    assert isinstance(worker._model, CausalModel)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_likeliest_is_the_first_of_the_largest(rows):
    """Half of the vocabulary is there twice, so every row has ties; one row's logits are not numbers."""
    folder = tiny_checkpoint("llama", tie_word_embeddings=False)
    worker = fused_worker(folder, max_num_seqs=64)
    seen = []
    original = worker._model.logits

    def watched(batch, step):
        logits = original(batch, step)
        values = logits.values.numpy().copy()
        seen.append((values, logits.likeliest.copy(), logits.largest.copy()))
        return logits

    worker._model.logits = watched
    jobs = greedy_jobs([5] * rows)
    Driver(worker).step(jobs, 1000)
    values, likeliest, largest = seen[-1]
    assert len(values) == rows
    assert (likeliest == values.argmax(axis=1)).all()
    assert (largest == values.max(axis=1)).all()
