"""Drafts that are drawn at random leave the law of the tokens as it is, whatever they are drawn from."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from conch.api import EngineConfig, SamplingParams, SpeculativeConfig
from conch.engine.local import LocalEngine
from support.distributions import check_fit, joint
from support.eagle import eagle3_config, eagle3_tensors, write_head
from support.oracle import Oracle
from support.tiny import tiny_checkpoint

COUNT = 4000
PROMPT = [5, 9, 20, 11, 9, 20]
VOCAB = 24
SETTINGS = {
    "plain": {},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {3: 2.0, 9: -100.0, 17: 4.0}},
}


def model(**changes):
    return tiny_checkpoint("llama", vocab_size=VOCAB, **changes)


MODELS = {"alike": {"seed": 0, "num_hidden_layers": 1}, "unlike": {"seed": 7}}
DRAFTERS = (*MODELS, "eagle")


def drafting(drafter: str) -> SpeculativeConfig:
    """Return a draft model, or a random head that can draft two thirds of the vocabulary."""
    common = {"num_speculative_tokens": 3, "backoff": False}
    if drafter != "eagle":
        return SpeculativeConfig(model=str(model(**MODELS[drafter])), **common)
    head = write_head(eagle3_tensors(vocab=VOCAB, drafted=16), eagle3_config())
    return SpeculativeConfig(method="eagle", model=str(head), **common)


@cache
def oracle():
    return Oracle(model())


@cache
def exact(setting: str) -> torch.Tensor:
    """Return the distribution of the first three tokens."""
    return joint(oracle(), PROMPT, SamplingParams(temperature=2.0, **SETTINGS[setting]), 3)


def sample(speculative: SpeculativeConfig | None, changes: dict) -> tuple[list[tuple[int, ...]], object]:
    config = EngineConfig(
        model=str(model()),
        dtype="float32",
        num_threads=1,
        seed=1,
        max_queue_size=COUNT,
        speculative_config=speculative,
    )
    params = [
        SamplingParams(temperature=2.0, max_tokens=5, ignore_eos=True, seed=seed, **changes)
        for seed in range(COUNT)
    ]
    with LocalEngine(config) as engine:
        answers = engine.generate([PROMPT] * COUNT, params)
        return [one.token_ids for (one,) in answers], engine.stats()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_keep_their_law(setting, drafter):
    samples, stats = sample(drafting(drafter), SETTINGS[setting])
    check_fit([tokens[:2] for tokens in samples], exact(setting).sum(2))
    check_fit([tokens[1:3] for tokens in samples], exact(setting).sum(0))
    assert stats.drafts >= COUNT
    assert 0.02 < stats.drafts_accepted / stats.drafts_proposed < 0.98, "both cases must have been seen"
