from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

pytest.importorskip("tritonclient.grpc")

from loadgen.grpc_client import greedy
from loadgen.latency import Arrival, Trace
from loadgen.mixture import SHARES, Account, Drawn, draws, faults

SHORT = Drawn("short", greedy("a", 2))
INVALID = Drawn("invalid", greedy("a", 2))


def ended(**changes: object) -> Trace:
    whole = {"arrivals": (Arrival(1.0, 1), Arrival(2.5, 1)), "finish_reason": "length", "num_finals": 1}
    return Trace(sent_s=0.5, **{**whole, **changes})


def test_the_mixture_is_reproducible_and_has_the_wanted_shares():
    drawn = list(islice(draws(3, 100), 4000))
    assert drawn == list(islice(draws(3, 100), 4000))
    counts = Counter(one.kind for one in drawn)
    for kind, share in SHARES.items():
        assert counts[kind] / len(drawn) == pytest.approx(share / 100, abs=0.02)


def test_each_kind_is_what_it_says():
    drawn = {one.kind: one for one in islice(draws(0, 500), 200)}
    assert drawn["empty"].request.text == ""
    assert len(drawn["over_context"].request.text.split()) > 500
    assert drawn["cancelled"].leave_after < drawn["cancelled"].request.sampling["max_tokens"]
    assert drawn["short"].leave_after is None


def test_a_healthy_end_has_no_faults():
    assert faults(SHORT, ended()) == []
    assert faults(INVALID, ended(error="no", arrivals=(), finish_reason=None)) == []


@pytest.mark.parametrize(
    ("drawn", "trace", "word"),
    [
        (SHORT, ended(num_finals=0), "0 final"),
        (SHORT, ended(num_finals=2), "2 final"),
        (SHORT, ended(num_after_final=1), "after the final"),
        (SHORT, ended(error="boom"), "boom"),
        (SHORT, ended(arrivals=(Arrival(1.0, 1),)), "1 tokens of 2"),
        (INVALID, ended(), "refused"),
    ],
)
def test_a_bad_end_is_named(drawn, trace, word):
    assert any(word in fault for fault in faults(drawn, trace))


def test_the_account_adds_up():
    account = Account(began_s=0.0)
    account.add(SHORT, ended())
    account.add(SHORT, ended(num_finals=0))
    account.add(SHORT, ended(cancelled=True, num_finals=0))
    account.add(SHORT, ended(num_finals=3, num_after_final=2))
    assert (account.missing_finals, account.surplus_finals, account.after_final) == (1, 2, 2)
    assert account.ended == {"short length": 3, "short left": 1}
    assert account.tokens_per_s(1, 3) == 4.0
    assert account.tokens_per_s(3, 5) == 0.0
