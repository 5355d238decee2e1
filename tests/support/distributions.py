"""Exact distributions of the first tokens of an answer, by the definitions, and how well samples fit them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from conch.api import SamplingParams
from support.oracle import Oracle

MIN_EXPECTED = 10


def next_distributions(
    oracle: Oracle, prompts: Sequence[Sequence[int]], num_prompt: int, params: SamplingParams
) -> torch.Tensor:
    """Return the distribution of the next token after each of N token lists of one length: float64 [N, V]."""
    with torch.inference_mode():
        ids = torch.tensor(prompts)
        logits = oracle.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, 0]
    logits = logits.double().clone()
    rows = zip(logits, prompts, strict=True)
    return torch.stack([_processed(row, list(tokens), num_prompt, params) for row, tokens in rows])


def _processed(
    logits: torch.Tensor, tokens: list[int], num_prompt: int, params: SamplingParams
) -> torch.Tensor:
    for token in set(tokens):
        value = logits[token]
        logits[token] = value * params.repetition_penalty if value < 0 else value / params.repetition_penalty
    for token, count in Counter(tokens[num_prompt:]).items():
        logits[token] -= params.presence_penalty + count * params.frequency_penalty
    for token, bias in params.logit_bias.items():
        logits[token] += -math.inf if bias == -100 else bias
    shares = torch.softmax(logits / params.temperature, 0)
    shares[shares < params.min_p * shares.max()] = 0
    order = shares.argsort(descending=True, stable=True)
    if params.top_k > 0:
        shares[order[params.top_k :]] = 0
    shares /= shares.sum()
    if params.top_p < 1:
        before = shares[order].cumsum(0) - shares[order]
        shares[order[before >= params.top_p]] = 0
    return shares / shares.sum()


def joint(oracle: Oracle, prompt: Sequence[int], params: SamplingParams, length: int) -> torch.Tensor:
    """Return the distribution of the first `length` tokens after a prompt: float64 [V, V, ...]."""
    contexts, shares = [list(prompt)], torch.ones(1, dtype=torch.float64)
    for _ in range(length):
        following = next_distributions(oracle, contexts, len(prompt), params)
        shares = (shares[:, None] * following).reshape(-1)
        vocab = following.shape[1]
        contexts = [[*context, token] for context in contexts for token in range(vocab)]
    return shares.reshape([vocab] * length)


def check_fit(samples: Sequence[tuple[int, ...]], expected: torch.Tensor) -> None:
    """Fail where samples are unlikely under a distribution, or have what it does not.

    Bins with fewer than `MIN_EXPECTED` expected samples are taken together.
    """
    counts = torch.zeros_like(expected)
    for sample in samples:
        counts[sample] += 1
    assert not counts[expected == 0].any(), "a token that is filtered out was sampled"
    wanted = (expected * len(samples)).reshape(-1)
    found = counts.reshape(-1)
    often = wanted >= MIN_EXPECTED
    wanted = torch.cat([wanted[often], wanted[~often].sum()[None]])
    found = torch.cat([found[often], found[~often].sum()[None]])
    if wanted[-1] < 1e-6:
        wanted, found = wanted[:-1], found[:-1]
    degrees = len(wanted) - 1
    assert degrees >= 3, "too few bins to say anything"
    chi_square = float((((found - wanted) ** 2) / wanted).sum())
    half = torch.tensor([degrees / 2, chi_square / 2], dtype=torch.float64)
    p_value = float(torch.special.gammaincc(half[0], half[1]))
    assert math.isfinite(p_value) and p_value > 1e-4, f"chi-square {chi_square:.1f} at {degrees} degrees"
