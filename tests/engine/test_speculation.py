"""Whoever drafts: greedy answers are transformers' in fp32, and what is drafted is counted truly."""

from __future__ import annotations

import random
from functools import cache

import msgspec
import pytest

from conch.api import EngineConfig, SamplingParams, SpeculativeConfig
from conch.engine.local import LocalEngine
from support.drafters import DRAFTERS, KNOWING, drafters, target
from support.oracle import Oracle, Same
from support.tiny import tiny_checkpoint
from support.traffic import mixed_prompts, staggered


@cache
def oracle() -> Oracle:
    return Oracle(tiny_checkpoint("llama"))


def config(drafter: str | None, **changes) -> EngineConfig:
    speculative = drafters()[drafter] if drafter else None
    defaults = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 16, "seed": 1}
    return EngineConfig(model=target(), **{**defaults, "speculative_config": speculative, **changes})


def greedy(count: int, **changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **changes})


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("kernel", ["cpu", "torch"])
@pytest.mark.parametrize(
    ("at_once", "changes"),
    [
        (1, {}),
        (16, {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 12}),
        (16, {"enable_prefix_caching": False, "num_gpu_blocks_override": 12}),
    ],
)
def test_greedy_answers_are_right(drafter, kernel, at_once, changes):
    rng = random.Random(3)
    prompts = mixed_prompts(rng, 16, longest=100, vocab=200)
    budgets = [rng.randint(10, 50) for _ in prompts]
    same = Same(oracle())
    with LocalEngine(config(drafter, attention_kernel=kernel, **changes)) as engine:
        answers = staggered(engine, prompts, budgets, at_once)
        stats = engine.stats()
    same.check_all(prompts, budgets, answers)
    assert stats.drafts > 20 and stats.drafts_proposed >= stats.drafts and stats.drafting_s > 0
    assert sum(stats.accepted_by_position) == stats.drafts_accepted
    assert list(stats.accepted_by_position) == sorted(stats.accepted_by_position, reverse=True)
    share = stats.drafts_accepted / stats.drafts_proposed
    if drafter in ("itself", "short"):
        assert share > 0.98, "the target does not agree with itself"
    if drafter in ("random", "eagle"):
        assert share < 0.05, "what is random can not know"
    assert at_once == 1 or stats.preemptions > 0, "the pool was never short"
    assert "enable_prefix_caching" in changes or stats.prefix_hits > 0
    assert stats.kv_blocks_used == 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_choices_of_one_prompt(drafter):
    """n = 2: the fork's draft KV is that of the prompt."""
    prompt = [7, 50, 60, 9] * 5 + [3]
    with LocalEngine(config(drafter)) as engine:
        (choices,) = engine.generate([prompt], [greedy(30, n=2)])
        stats = engine.stats()
    same = Same(oracle())
    for choice in choices:
        same.check(prompt, list(choice.token_ids))
    assert stats.drafts > 0 and (drafter != "itself" or stats.drafts_accepted == stats.drafts_proposed)


SETTINGS = [
    greedy(24),
    greedy(24, repetition_penalty=1.3),
    greedy(24, presence_penalty=2.0),
    greedy(24, frequency_penalty=2.0, logprobs=3),
    greedy(24, logit_bias={5: 100.0}, min_tokens=4),
    greedy(24, logit_bias={5: -100.0, 17: 4.0}),
    greedy(24, stop_token_ids=tuple(range(2, 60)), min_tokens=6),
    SamplingParams(temperature=1.0, top_k=5, seed=5, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.3, seed=6, max_tokens=24, logprobs=0),
    SamplingParams(temperature=1.3, min_p=0.1, seed=7, max_tokens=24, logprobs=5),
    SamplingParams(temperature=1.0, seed=8, max_tokens=24, stop_token_ids=(9, 10, 11), min_tokens=10),
    SamplingParams(temperature=0.7, seed=9, max_tokens=24, repetition_penalty=1.2, ignore_eos=True),
]
PROMPTS = [[7 + index, 50, 60, 9, 7 + index, 50, 60] for index in range(len(SETTINGS))]


@cache
def solo_answers():
    """Return what each request gets alone, without drafts."""
    with LocalEngine(config(None)) as engine:
        return [
            engine.generate([prompt], [params])[0][0]
            for prompt, params in zip(PROMPTS, SETTINGS, strict=True)
        ]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_settings_keep_their_meaning_in_any_company(drafter):
    """Greedy ones always, and all of them where drafts are not drawn, get the very tokens of a solo run."""
    draws = drafter not in ("ngram", "suffix")
    with LocalEngine(config(drafter, max_num_batched_tokens=24)) as engine:
        for shuffle in range(3):
            order = random.Random(shuffle).sample(range(len(SETTINGS)), len(SETTINGS))
            answers = engine.generate([PROMPTS[i] for i in order], [SETTINGS[i] for i in order])
            for index, (answer,) in zip(order, answers, strict=True):
                if not draws or SETTINGS[index].is_greedy:
                    check_same(answer, solo_answers()[index])
                check_bounds(answer, SETTINGS[index])
        assert engine.stats().drafts_accepted > 0 or drafter in ("random", "eagle")


def check_same(answer, expected):
    assert answer.token_ids == expected.token_ids
    assert answer.finish_reason is expected.finish_reason
    for one, other in zip(answer.logprobs or (), expected.logprobs or (), strict=True):
        assert one.token_id == other.token_id and one.rank == other.rank
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def check_bounds(answer, params):
    if params.logprobs is not None:
        assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)
        assert all(len(entry.top) == params.logprobs for entry in answer.logprobs)
        assert any(entry.logprob < -0.01 for entry in answer.logprobs)
    ends = [index for index, token in enumerate(answer.token_ids) if token in params.stop_token_ids]
    assert all(index == len(answer.token_ids) - 1 for index in ends)
    assert len(answer.token_ids) >= min(params.min_tokens, params.max_tokens)
    banned = {token for token, bias in params.logit_bias.items() if bias == -100}
    assert not banned & set(answer.token_ids)


def test_seeded_draws_do_not_depend_on_batch_mates():
    """With a draft model too: where as many tokens are drafted, the same are drawn."""
    params = SamplingParams(temperature=1.0, seed=77, max_tokens=30, ignore_eos=True)
    prompt = [5, 9, 100, 31]
    with LocalEngine(config("itself")) as engine:
        alone = engine.generate([prompt], [params])[0][0].token_ids
        crowd = [[i + 3] * (i + 1) for i in range(8)]
        others = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
        together = engine.generate([*crowd, prompt], [*[others] * 8, params])[-1][0].token_ids
    assert together == alone
    assert len(set(alone)) > 5


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_never_pass_the_context(drafter):
    rng = random.Random(96)
    prompts = [[rng.randrange(200) for _ in range(length)] for length in range(85, 96)]
    prompts = [[*prompt[:40], *prompt[:40], *prompt[80:]] for prompt in prompts]
    with LocalEngine(config(drafter, max_model_len=96)) as engine:
        answers = engine.generate([*prompts, [4, 5, 6] * 3], [greedy(96)] * len(prompts) + [greedy(60)])
        stats = engine.stats()
    same = Same(oracle())
    for prompt, (answer,) in zip([*prompts, [4, 5, 6] * 3], answers, strict=True):
        assert len(answer.token_ids) == min(96 - len(prompt), 60) and answer.finish_reason == "length"
        same.check(prompt, list(answer.token_ids))
    assert stats.drafts > 0 and stats.kv_blocks_used == 0


def test_a_request_says_how_much_is_drafted_for_it():
    prompt = [5, 9, 100, 31]
    asked = [None, 0, 2]
    with LocalEngine(config("itself")) as engine:
        answers = engine.generate([prompt] * 3, [greedy(25, num_speculative_tokens=count) for count in asked])
        usages = [answer.usage for (answer,) in answers]
        stats = engine.stats()
    assert [usage.num_draft_tokens > 0 for usage in usages] == [True, False, True]
    assert usages[0].num_accepted_tokens == 19 and usages[2].num_accepted_tokens == 16
    assert stats.drafts_proposed == sum(usage.num_draft_tokens for usage in usages)
    assert len({answer.token_ids for (answer,) in answers}) == 1


def test_fewer_are_drafted_in_a_larger_batch():
    settings = SpeculativeConfig(
        model=target(),
        num_speculative_tokens=4,
        num_speculative_tokens_per_batch_size=((2, 3, 1), (4, 64, 0)),
        backoff=False,
    )
    prompts = [[index + 3, 9, 100, 31] for index in range(4)]
    proposed = {}
    for count in (1, 2, 4):
        with LocalEngine(config(None, speculative_config=settings)) as engine:
            engine.generate(prompts[:count], [greedy(21)] * count)
            stats = engine.stats()
            proposed[count] = stats.drafts_proposed / max(1, stats.drafts)
    assert proposed[1] == 4 and proposed[2] == 1 and proposed[4] == 0


def test_a_useless_drafter_is_given_up():
    """All of a random model's drafts are wrong: with back-off hardly any are made, without many."""
    settings = drafters()["random"]
    proposed = {}
    for backoff in (True, False):
        own = SpeculativeConfig(model=settings.model, num_speculative_tokens=3, backoff=backoff)
        with LocalEngine(config(None, speculative_config=own)) as engine:
            engine.generate([[index + 3, 9] for index in range(8)], [greedy(200)] * 8)
            proposed[backoff] = engine.stats().drafts_proposed
    assert 0 < proposed[True] < proposed[False] / 5


@pytest.mark.parametrize("drafter", ["ngram", "itself", "random", "eagle"])
@pytest.mark.parametrize("count", [1, 3, 5, 8])
def test_state_is_each_requests_own(drafter, count):
    """Greedy and sampled requests join at random steps: nobody gets anything of another's."""
    rng = random.Random(count)
    prompts = [[7 + index % 8, 50, 60, 9] * 3 for index in range(16)]
    sampled = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=30, ignore_eos=True) for seed in range(8)
    ]
    params = [greedy(30)] * 8 + sampled
    with LocalEngine(config(None)) as engine:
        alone = [answer.token_ids for (answer,) in engine.generate(prompts, params)]
    settings = msgspec.structs.replace(drafters()[drafter], num_speculative_tokens=count)
    answers: dict[int, list[int]] = {}
    with LocalEngine(config(None, speculative_config=settings, num_gpu_blocks_override=24)) as engine:
        waiting = rng.sample(range(16), 16)
        index_of = {}
        while waiting or engine.has_work:
            for _ in range(min(len(waiting), rng.randint(0, 3))):
                index = waiting.pop()
                index_of[engine.add(prompts[index], params[index])] = index
            for output in engine.step():
                answers.setdefault(index_of[output.request_id], []).extend(output.token_ids)
        stats = engine.stats()
    for index in range(8 if drafter != "ngram" else 16):
        assert tuple(answers[index]) == alone[index]
    assert stats.drafts > 0 and stats.kv_blocks_used == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("at_once", [1, 16])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_two_hundred_answers_are_right(drafter, at_once):
    rng = random.Random(200)
    prompts = mixed_prompts(rng, 200, longest=100, vocab=300)
    budgets = [rng.randint(16, 64) for _ in prompts]
    same = Same(oracle())
    with LocalEngine(config(drafter)) as engine:
        answers = staggered(engine, prompts, budgets, at_once)
        stats = engine.stats()
    same.check_all(prompts, budgets, answers)
    least = 500 if drafter == "short" else 1000  # what it cannot see any more it does not draft for
    assert stats.drafts > least and stats.kv_blocks_used == 0
    assert (stats.drafts_accepted > 500) == (drafter in KNOWING)
