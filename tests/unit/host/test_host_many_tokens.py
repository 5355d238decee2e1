"""A step may bring many tokens of a choice: text and stop strings are those of single tokens."""

from __future__ import annotations

import random

import pytest

from conch.api.sampling import SamplingParams
from conch.api.steps import FinishReason, RequestOutput, TokenLogprobs, Usage
from conch.host.choice import ChoiceFactory
from conch.host.codec import TextCodec
from host.host_fakes import small_tokenizer

TOKENIZER = small_tokenizer()
CODEC = TextCodec(TOKENIZER)
TEXT = "the quick brown fox jumps: 日本語 😀 abcabcX the end of it, the end"


def served(params, sizes):
    """Serve `TEXT` in groups of tokens; returns text, reason, number of tokens, sum of logprobs."""
    ids = TOKENIZER.encode(TEXT).ids
    choice = ChoiceFactory(params, CODEC).make()
    text, start = "", 0
    while start < len(ids) and choice.finish_reason is None:
        end = min(start + next(sizes), len(ids))
        is_last = end == len(ids)
        logprobs = tuple(TokenLogprobs(token, -0.5, 1, ()) for token in ids[start:end])
        reason = FinishReason.LENGTH if is_last else None
        usage = Usage(1, len(ids), 0, 0, 0.0, 0.0, 0.0) if is_last else None
        choice.take(RequestOutput(1, 0, tuple(ids[start:end]), logprobs, reason, usage))
        text += "".join(choice.text)
        choice.clear()
        start = end
    return text, choice.finish_reason, choice.num_output, choice.cumulative_logprob


def ones():
    while True:
        yield 1


def some(seed):
    rng = random.Random(seed)
    while True:
        yield rng.randint(1, 9)


@pytest.mark.parametrize(
    "stop", [(), ("own fo",), ("abcX",), ("語 😀",), ("the en", "the end"), ("not there",), ("it, the e",)]
)
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_it_does_not_matter_how_tokens_come(stop, include, seed):
    params = SamplingParams(
        max_tokens=500, stop=stop, include_stop_str_in_output=include, min_tokens=3, logprobs=0
    )
    expected = served(params, ones())
    assert served(params, some(seed)) == expected
    first = min((TEXT.index(one) for one in stop if one in TEXT), default=None)
    if first is not None and not include:
        assert expected[0] == TEXT[:first] and expected[1] is FinishReason.STOP
