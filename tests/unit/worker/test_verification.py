"""A draft that was drawn is taken or replaced so that the token has the target's distribution."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conch.worker.philox import Purpose, uniforms
from conch.worker.verification import DrawnDraft, accepted_count, decide
from support.distributions import check_fit

COUNT = 20_000


def shares(values):
    values = torch.tensor(values, dtype=torch.float64)
    return values / values.sum()


def decided(target, drafted, seed=1):
    """Decide `COUNT` places whose drafts are drawn from `drafted`."""
    make = torch.Generator().manual_seed(seed)
    uniform = torch.rand((2, COUNT), generator=make, dtype=torch.float64)
    tokens = torch.multinomial(drafted, COUNT, replacement=True, generator=make).tolist()
    distribution = drafted.float()
    drafts = [DrawnDraft(token, float(distribution[token]), distribution) for token in tokens]
    targets = target.float().expand(COUNT, -1)
    return tokens, decide(targets, drafts, uniform[0], uniform[1])


@pytest.mark.parametrize(
    ("target", "drafted"),
    [
        ([5, 3, 1, 1], [1, 1, 1, 1]),
        ([5, 0, 3, 1, 1], [1, 6, 1, 1, 1]),
        ([5, 3, 1, 1, 0], [0, 0, 0, 1, 1]),
        ([1, 2, 3, 4], [1, 2, 3, 4]),
    ],
)
def test_the_law_is_the_targets(target, drafted):
    target, drafted = shares(target), shares(drafted)
    tokens, found = decided(target, drafted)
    check_fit([(token,) for token in found], target)
    taken = sum(one == other for one, other in zip(tokens, found, strict=True)) / COUNT
    best = float(torch.minimum(target, drafted).sum())
    assert taken == pytest.approx(best, abs=0.02), "no rule takes drafts more often"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=2, max_size=6), st.data())
def test_what_is_filtered_out_is_never_decided(pairs, data):
    if not any(target for target, _ in pairs):
        return
    target = shares([target for target, _ in pairs]).float()[None]
    drafted = shares([share for _, share in pairs]).float()
    token = data.draw(st.integers(0, len(pairs) - 1))
    numbers = st.floats(0, 1, exclude_max=True)
    accept, residual = (torch.tensor([data.draw(numbers)], dtype=torch.float64) for _ in range(2))
    (found,) = decide(target, [DrawnDraft(token, float(drafted[token]), drafted)], accept, residual)
    assert target[0, found] > 0


def test_a_draft_from_the_very_target_is_always_taken():
    target = shares([1, 7, 3, 9, 2])
    tokens, found = decided(target, target)
    assert tokens == found


def test_no_two_purposes_share_a_random_number():
    seeds, positions = torch.arange(50).numpy().astype("uint64"), torch.arange(50).numpy()
    drawn = [uniforms(seeds, positions, purpose) for purpose in Purpose]
    assert len({float(number) for numbers in drawn for number in numbers}) == 50 * len(Purpose)


def test_accepted_count():
    assert accepted_count((), [5]) == 1
    assert accepted_count((5, 6), [5, 6, 7]) == 3
    assert accepted_count((5, 6), [5, 9, 7]) == 2
    assert accepted_count((5, 6), [4, 6, 7]) == 1
