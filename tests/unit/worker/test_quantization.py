"""Quantised weights in the fused decoder: near the oracle, not equal to it, refused where they cannot be."""

from __future__ import annotations

import pytest
import torch

from conch.api import ConfigError
from support.oracle import Oracle
from support.tiny import tiny_checkpoint
from support.worker_driver import Driver, build_worker
from unit.worker.test_families import LENGTHS, greedy_jobs

FUSED = {"attention_kernel": "cpu", "num_threads": 2}
SIZES = {"hidden_size": 64, "intermediate_size": 128}


def last_logits(worker, jobs):
    """Serve all prompts in one step; returns the logits after each."""
    seen = []
    original = worker._model.logits

    def watched(batch, step):
        logits = original(batch, step)
        seen.append(logits.values.clone())
        return logits

    worker._model.logits = watched
    Driver(worker).step(jobs, 1000)
    return seen[0]


def error_of(folder, jobs, found):
    oracle = Oracle(folder)
    expected = torch.stack([oracle.logits(job.prompt, keep=1)[0] for job in jobs])
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_int8_is_near(family, dtype, tied):
    folder = tiny_checkpoint(family, tie_word_embeddings=tied, **SIZES)
    jobs = greedy_jobs(LENGTHS, max_tokens=2)
    plain, quantised = (
        error_of(folder, jobs, last_logits(build_worker(folder, dtype=dtype, **FUSED, **more), jobs_again))
        for more, jobs_again in (({}, greedy_jobs(LENGTHS)), ({"quantization": "int8"}, jobs))
    )
    assert plain < (1e-5 if dtype == "float32" else 0.03)
    assert 1e-3 < quantised < 0.04  # quantised indeed: fp32 alone would be far nearer


def test_int8_keeps_what_has_no_groups():
    """A depth of 48 is no multiple of 32: those matrices stay in fp32."""
    folder = tiny_checkpoint("llama")
    jobs = greedy_jobs(LENGTHS)
    found = last_logits(build_worker(folder, quantization="int8", **FUSED), jobs)
    assert 1e-4 < error_of(folder, jobs, found) < 0.03  # the down projections, 96 deep, are quantised


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"quantization": "gguf", **FUSED}, "serves the blocks of a .gguf file"),
        ({"quantization": "int8", "attention_kernel": "torch"}, "needs attention_kernel 'cpu'"),
        ({"quantization": "int8", "model_impl": "transformers", **FUSED}, "model_impl is 'transformers'"),
    ],
)
def test_what_cannot_be_quantised(settings, why):
    with pytest.raises(ConfigError, match=why):
        build_worker(tiny_checkpoint("llama"), **settings)


def test_a_model_that_is_not_fused():
    with pytest.raises(ConfigError, match="mixtral models are not among the fused families"):
        build_worker(tiny_checkpoint("mixtral"), quantization="int8", **FUSED)
