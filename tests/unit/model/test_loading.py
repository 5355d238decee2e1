"""Weights that fit are served as transformers serves them; weights that do not are refused by name."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from conch.api import CheckpointError, SamplingParams
from conch.model.loading import load_module
from conch.worker import prepare
from support.oracle import Oracle, Same
from support.tiny import tiny_checkpoint
from support.worker_driver import Driver, Job, build_worker, config_for, silent

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def variant(tmp_path):
    """Copy a tiny llama with changed weights and config."""

    def make(change_weights=lambda weights: None, **config):
        folder = tmp_path / "variant"
        shutil.copytree(tiny_checkpoint("llama"), folder)
        weights = load_file(folder / "model.safetensors")
        change_weights(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
        return folder

    return make


@pytest.fixture(params=[{}, {"attention_kernel": "cpu", "model_impl": "fused"}], ids=["modules", "fused"])
def make(request):
    """Settings of either make of a model: all that is said of checkpoints holds for both."""
    return request.param


def answer(folder, make):
    job = Job(1, [5, 6, 7, 8, 200], SamplingParams(temperature=0.0, max_tokens=12))
    Driver(build_worker(folder, **make)).run([job])
    same = Same(Oracle(folder))
    same.check(job.prompt, job.output)
    same.finish()
    return job.output


def drop_head(weights):
    del weights[HEAD]


def equal_head(weights):
    weights[HEAD] = weights[EMBEDDING].clone()


def test_tied_and_untied_heads_equal_transformers(variant, make):
    answers = []
    for change, tie in ((drop_head, True), (equal_head, True), (lambda weights: None, False)):
        folder = variant(change, tie_word_embeddings=tie)
        answers.append(answer(folder, make))
        shutil.rmtree(folder)
    assert answers[0] == answers[1] != answers[2]


def test_a_head_beside_a_tie_is_what_transformers_makes_of_it(variant, make):
    answer(variant(tie_word_embeddings=True), make)


def test_a_missing_head_is_refused(variant, make):
    with pytest.raises(CheckpointError, match=r"lacks parameter lm_head\.weight"):
        build_worker(variant(drop_head, tie_word_embeddings=False), **make)


def test_other_misfits_are_refused_by_name(variant, make):
    name = "model.layers.1.mlp.down_proj.weight"
    changes = {
        rf"lacks parameter {name}": lambda weights: weights.pop(name),
        r"holds parameter model\.extra\.weight": lambda weights: weights.update(
            {"model.extra.weight": torch.zeros(3)}
        ),
        name: lambda weights: weights.update({name: torch.zeros(5, 5)}),
    }
    for message, change in changes.items():
        folder = variant(change)
        with pytest.raises(CheckpointError, match=message):
            build_worker(folder, **make)
        shutil.rmtree(folder)


def test_a_broken_file_is_refused(variant, make):
    folder = variant()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        build_worker(folder, **make)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_and_progress(dtype):
    prepared = prepare(config_for(tiny_checkpoint("mixtral"), dtype=dtype), silent)
    news = []
    module = load_module(prepared.description, lambda stage, fraction: news.append((stage, fraction)))
    assert {weight.dtype for weight in module.parameters()} == {getattr(torch, dtype)}
    assert not any(weight.is_meta for weight in module.state_dict().values())
    fractions = [fraction for _, fraction in news]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0 and len(fractions) > 10


def test_auto_dtype_is_that_of_the_checkpoint(variant):
    for stated in ("bfloat16", "float32"):
        folder = variant(dtype=stated)
        assert prepare(config_for(folder, dtype="auto"), silent).spec.attention.dtype == stated
        shutil.rmtree(folder)
    folder = variant(dtype=None)
    assert prepare(config_for(folder, dtype="auto"), silent).spec.attention.dtype == "float32"
