"""When a choice has something to say."""

from __future__ import annotations

import pytest

from conch.api.sampling import SamplingParams
from conch.api.steps import FinishReason, RequestOutput, Usage
from conch.host.choice import ChoiceFactory
from conch.host.codec import TextCodec
from host.host_fakes import small_tokenizer

CODEC = TextCodec(small_tokenizer())


def pieces(length, interval):
    """Tokens of each response to a stream of that many tokens that come one by one."""
    choice = ChoiceFactory(SamplingParams(max_tokens=length), CODEC).make()
    taken = []
    for index in range(length):
        is_last = index == length - 1
        usage = Usage(1, length, 0, 0, 0.0, 0.0, 0.0) if is_last else None
        reason = FinishReason.LENGTH if is_last else None
        choice.take(RequestOutput(1, 0, (50,), None, reason, usage))
        if choice.is_due(interval):
            taken.append(len(choice.token_ids))
            choice.clear()
    return taken


@pytest.mark.parametrize(
    ("length", "interval", "expected"),
    [
        (1, 4, [1]),
        (2, 4, [1, 1]),
        (5, 4, [1, 4]),
        (6, 4, [1, 4, 1]),
        (12, 4, [1, 4, 4, 3]),
        (4, 1, [1, 1, 1, 1]),
        (3, 1000, [1, 2]),
    ],
)
def test_the_first_token_comes_at_once_then_as_many_as_are_asked_for(length, interval, expected):
    assert pieces(length, interval) == expected
