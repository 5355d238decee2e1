"""The sampler against transformers' logits processors and against exact distributions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from conch.api import Admission, SamplingParams
from conch.model.logits import Logits
from conch.worker.batch_builder import LogitRows
from conch.worker.drawing import DrawSettings, distribution, draw, kept_weights
from conch.worker.logit_edits import edit_logits
from conch.worker.row_table import RowTable
from conch.worker.sampler import Sampler

VOCAB = 50
PROMPT = [3, 4, 4, 9]
OUTPUT = [4, 7, 7, 7, 30]
NEXT = len(PROMPT) + len(OUTPUT)
EOS = frozenset({1, 2})


def table_of(*params, seeds=None, prompt=PROMPT, output=OUTPUT):
    table = RowTable(len(params), 64, 4)
    for index, one in enumerate(params):
        tokens = (*prompt, *output)
        seed = index if seeds is None else seeds[index]
        table.admit(Admission(index, tokens, len(prompt), one, seed, 64))
    return table


def sample(logits, *params, position=NEXT, seeds=None, **tokens):
    """Sample one token for each of `params`, all with the same or their own logits."""
    table = table_of(*params, seeds=seeds, **tokens)
    logits = logits.expand(len(params), -1) if logits.dim() == 1 else logits
    rows = np.array([table.row_of(index) for index in range(len(params))])
    return Sampler(table, EOS).sample(
        Logits.of(logits.clone()), LogitRows(rows, np.full(len(params), position))
    )


def random_logits(*shape, seed=0, scale=3.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def edited(logits, params, position=NEXT):
    table = table_of(params)
    logits = logits.clone()
    edit_logits(logits, table, table.row_of(0), position, EOS)
    return logits


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    settings = draw_settings(len(logits), temperature, top_k, top_p, min_p)
    weights = kept_weights(logits, settings).double()
    return weights / weights.sum(dim=1, keepdim=True)


def draw_settings(count, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.5):
    def full(value, dtype=torch.float64):
        return torch.full((count,), value, dtype=dtype)

    return DrawSettings(full(temperature), full(top_k, torch.int64), full(top_p), full(min_p), full(uniform))


# --- filters ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_p": 0.6}, [TopPLogitsWarper(0.6)]),
        ({"top_p": 0.99}, [TopPLogitsWarper(0.99)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        ({"top_k": 8, "top_p": 0.7}, [TopKLogitsWarper(8), TopPLogitsWarper(0.7)]),
        (
            {"temperature": 1.7, "min_p": 0.02, "top_k": 20, "top_p": 0.8},
            [
                TemperatureLogitsWarper(1.7),
                MinPLogitsWarper(0.02),
                TopKLogitsWarper(20),
                TopPLogitsWarper(0.8),
            ],
        ),
    ],
)
@pytest.mark.parametrize("vocab", [VOCAB, 3000])
def test_filters_equal_transformers(ours, theirs, vocab):
    logits = random_logits(6, vocab)
    expected = logits
    for processor in theirs:
        expected = processor(None, expected)
    expected = torch.softmax(expected.double(), dim=1)
    torch.testing.assert_close(probabilities(logits, **ours), expected, atol=1e-6, rtol=1e-5)


def test_flat_distributions_need_more_than_the_head():
    logits = random_logits(2, 6000, scale=0.01)
    kept = probabilities(logits, top_p=0.9) > 0
    expected = torch.softmax(TopPLogitsWarper(0.9)(None, logits), dim=1) > 0
    assert (kept.sum(dim=1) > 5000).all()
    assert (kept != expected).sum() <= 4  # rounding of transformers' fp32 sum
    assert ((probabilities(logits, top_k=5000) > 0).sum(dim=1) == 5000).all()


@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    st.integers(0, 45),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=200, deadline=None)
def test_ties_are_kept_in_order_and_never_nothing(values, top_k, top_p, min_p, uniform):
    logits = torch.tensor([values], dtype=torch.float32)
    kept = probabilities(logits, 1.0, top_k, top_p, min_p)[0] > 0
    assert kept.any()
    if top_k:
        assert kept.sum() <= top_k
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    assert set(order[: int(kept.sum())]) == set(torch.nonzero(kept).flatten().tolist())
    token = int(draw(logits, draw_settings(1, 1.0, top_k, top_p, min_p, uniform)))
    assert kept[token]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_extreme_draws_stay_on_kept_tokens(uniform):
    logits = random_logits(4, VOCAB)
    logits[:, 0] = logits[:, -1] = float("-inf")
    token_ids = draw(logits, draw_settings(4, top_k=7, uniform=uniform))
    kept = probabilities(logits, top_k=7) > 0
    for row, token in enumerate(token_ids.tolist()):
        members = torch.nonzero(kept[row]).flatten().tolist()
        assert token == (members[0] if uniform == 0 else members[-1])


def test_draws_follow_the_distribution():
    logits = random_logits(12, seed=5)
    expected = torch.softmax(logits.double(), dim=0)
    count = 20_000
    params = [SamplingParams(temperature=1.0)] * 100
    table = table_of(*params, prompt=[0], output=[])
    rows = np.array([table.row_of(index) for index in range(100)])
    sampler = Sampler(table, EOS)
    drawn = []
    for position in range(1, 1 + count // 100):
        where = LogitRows(rows, np.full(100, position))
        drawn += sampler.sample(Logits.of(logits.expand(100, -1).clone()), where).token_ids
    counts = np.bincount(drawn, minlength=12)
    often = expected.numpy() * count >= 10
    chi_square = (((counts - expected.numpy() * count) ** 2) / (expected.numpy() * count))[often].sum()
    assert chi_square < 40  # 11 degrees of freedom: p about 4e-5


@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0, 6.0])
@pytest.mark.parametrize(
    "filters",
    [
        {"top_p": 0.95},
        {"top_p": 0.3},
        {"top_p": 1 - 1e-12},
        {"top_k": 40},
        {"top_k": 40, "top_p": 0.9},
        {"top_k": 1 << 40, "top_p": 0.5},
        {"top_k": 700, "top_p": 0.9},
        {"top_k": 5000, "top_p": 0.999},
        {"min_p": 0.05},
        {"min_p": 1e-5, "top_p": 0.8},
        {"min_p": 0.01, "top_k": 20, "top_p": 0.99},
    ],
)
def test_a_row_drawn_by_itself_equals_one_of_a_filtered_batch(scale, filters):
    logits = (random_logits(8, 6000, seed=4, scale=scale) * 4).round() / 4  # many ties
    for uniform in (0.0, 0.37, 0.9, 1 - 2**-53):
        settings = draw_settings(8, 0.8, uniform=uniform, **filters)
        weights = kept_weights(logits, settings)
        shares = weights / weights.sum(dim=1, keepdim=True)
        torch.testing.assert_close(distribution(logits, settings), shares, atol=1e-6, rtol=1e-5)
        for row, token in enumerate(draw(logits, settings).tolist()):
            cumulative = weights[row].double().cumsum(0)
            target = min(uniform * cumulative[-1].item(), np.nextafter(cumulative[-1].item(), 0))
            assert token == int(torch.searchsorted(cumulative, target, right=True))


# --- what equals greedy, what is off ---------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": value} for value in (0.0, -0.0, 1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
    ] + [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}],
)  # fmt: skip
def test_equals_greedy(params):
    logits = random_logits(VOCAB, scale=30.0)
    for seed in range(8):
        assert sample(logits, SamplingParams(**params), seeds=[seed]).token_ids == [int(logits.argmax())]


def test_ties_go_to_the_first():
    logits = torch.zeros(VOCAB)
    logits[[11, 40]] = 5.0
    for params in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}):
        for seed in range(8):
            assert sample(logits, SamplingParams(**params), seeds=[seed]).token_ids == [11]


def test_values_that_turn_a_filter_off_change_nothing():
    logits = random_logits(VOCAB)
    off = [
        {},
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": VOCAB},
        {"top_k": VOCAB + 1},
        {"top_k": 2**31},
        {"top_k": 2**70},
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"repetition_penalty": 1.0},
        {"presence_penalty": 0.0, "frequency_penalty": 0.0},
        {"logit_bias": {}},
        {"min_tokens": 0},
    ]
    for seed in range(20):
        tokens = {sample(logits, SamplingParams(**each), seeds=[seed]).token_ids[0] for each in off}
        assert len(tokens) == 1


# --- edits -----------------------------------------------------------------


def test_repetition_penalty_equals_transformers():
    logits = random_logits(VOCAB)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([PROMPT + OUTPUT]), logits[None].clone())[0]
    torch.testing.assert_close(edited(logits, SamplingParams(repetition_penalty=1.3)), expected)


def test_presence_and_frequency_count_the_output_only():
    logits = random_logits(VOCAB)
    result = edited(logits, SamplingParams(presence_penalty=0.5, frequency_penalty=0.25))
    minus = torch.zeros(VOCAB)
    minus[4], minus[7], minus[30] = 0.75, 1.25, 0.75
    torch.testing.assert_close(result, logits - minus)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_bias_forces_and_bans_exactly(temperature):
    logits = random_logits(VOCAB, scale=40.0)
    best = int(logits.argmax())
    worst = int(logits.argmin())
    for seed in range(30):
        forced = SamplingParams(temperature=temperature, logit_bias={worst: 100.0})
        assert sample(logits, forced, seeds=[seed]).token_ids == [worst]
        banned = SamplingParams(temperature=temperature, logit_bias={best: -100.0})
        assert sample(logits, banned, seeds=[seed]).token_ids != [best]
    torch.testing.assert_close(
        edited(logits, SamplingParams(logit_bias={0: 1.5, VOCAB - 1: -2.0})) - logits,
        torch.tensor([1.5, *[0.0] * (VOCAB - 2), -2.0]),
        atol=1e-5,
        rtol=0,
    )


def test_min_tokens_bans_every_end_until_reached():
    logits = torch.zeros(VOCAB)
    logits[[1, 2, 8]] = torch.tensor([50.0, 49.0, 48.0])
    logits[20] = 1.0
    early = SamplingParams(temperature=0.0, min_tokens=len(OUTPUT) + 1, stop_token_ids=(8,))
    reached = SamplingParams(temperature=0.0, min_tokens=len(OUTPUT), stop_token_ids=(8,))
    assert sample(logits, early, reached).token_ids == [20, 1]


# --- log-probabilities -----------------------------------------------------


def test_logprobs_are_those_of_the_model():
    logits = random_logits(3, VOCAB)
    plain = torch.log_softmax(logits, dim=1)
    params = [
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=3.0, top_k=10, repetition_penalty=1.5, logprobs=5),
        SamplingParams(temperature=0.0),
    ]
    result = sample(logits, *params)
    assert set(result.logprobs) == {0, 1}
    for row, wanted in ((0, 0), (1, 5)):
        one = result.logprobs[row]
        assert one.token_id == result.token_ids[row]
        assert one.logprob == pytest.approx(float(plain[row, one.token_id]), abs=1e-6)
        assert one.rank == 1 + int((logits[row] > logits[row, one.token_id]).sum())
        best = plain[row].topk(wanted)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-6)


# --- batches ---------------------------------------------------------------

MIXTURE = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, presence_penalty=2.0),
    SamplingParams(temperature=0.0, frequency_penalty=2.0),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.3),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=0.0, logit_bias={7: -100.0, 5: 3.0}),
    SamplingParams(temperature=2.5, repetition_penalty=0.8, top_k=30, top_p=0.9, logprobs=3),
    SamplingParams(min_tokens=16, stop_token_ids=(9,)),
    SamplingParams(),
    SamplingParams(temperature=0.0, logprobs=1),
]


def test_a_row_does_not_depend_on_its_batch():
    logits = random_logits(len(MIXTURE), VOCAB, seed=3, scale=1.0)
    seeds = [100 + index for index in range(len(MIXTURE))]
    solo = [
        sample(logits[index], params, seeds=[seeds[index]]).token_ids[0]
        for index, params in enumerate(MIXTURE)
    ]
    plain = [int(row.argmax()) for row in logits]
    assert sum(a != b for a, b in zip(solo, plain, strict=True)) >= 4  # settings do something
    shuffle = np.random.default_rng(0)
    for _ in range(10):
        order = shuffle.permutation(len(MIXTURE)).tolist()
        mixed = sample(
            logits[order], *(MIXTURE[index] for index in order), seeds=[seeds[index] for index in order]
        )
        assert mixed.token_ids == [solo[index] for index in order]
        for place, index in enumerate(order):
            assert (place in mixed.logprobs) == (MIXTURE[index].logprobs is not None)


def test_greedy_batches_pay_for_nothing_else(monkeypatch):
    import conch.worker.sampler as module

    def refuse(*args):
        raise AssertionError("not for greedy rows")

    for name in ("draw", "edit_logits", "uniforms"):
        monkeypatch.setattr(module, name, refuse)
    sample(random_logits(4, VOCAB), *[SamplingParams(temperature=0.0)] * 4)


def test_a_special_row_changes_nothing_for_greedy_ones():
    logits = random_logits(3, VOCAB)
    logits[0, 7] = logits[0, 30] = 9.0
    greedy = SamplingParams(temperature=0.0)
    alone = sample(logits[:2], greedy, greedy)
    for special in ({"temperature": 1.0}, {"temperature": 0.0, "min_tokens": 16}, {"logprobs": 0}):
        beside = sample(logits, greedy, greedy, SamplingParams(**special))
        assert beside.token_ids[:2] == alone.token_ids == [7, int(logits[1].argmax())]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams()])
def test_numbers_that_are_none_are_told_and_harm_no_neighbour(bad, params):
    logits = random_logits(3, VOCAB)
    healthy = sample(logits, params, params, params).token_ids
    logits[1, 17] = bad
    sampled = sample(logits, params, params, params)
    assert sampled.broken.keys() == {1}
    assert [sampled.token_ids[index] for index in (0, 2)] == [healthy[index] for index in (0, 2)]
