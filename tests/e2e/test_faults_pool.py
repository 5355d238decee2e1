"""A small KV pool behind the server: F21, F25, F29, F31 and F32 as clients see them."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.fault_checks import GREEDY, FaultServer, body, wait_for_metric
from support.fault_models import SMALL_POOL_TOKENS
from support.oracle import Same
from support.server import wait_until
from support.wire import Answer, ServedModel

pytestmark = pytest.mark.e2e

POOL = SMALL_POOL_TOKENS
ENDS_BIG_WITHIN_S = 5


def draw(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 320) for _ in range(length)]


@pytest.fixture
def model(faults: FaultServer) -> ServedModel:
    return faults.model("small_pool")


# -- F29 and F32


def test_no_success_without_tokens(faults: FaultServer, model: ServedModel):
    rng = random.Random(29)
    same = Same(faults.oracle("small_pool"))
    for length in (POOL // 2, POOL * 9 // 10, POOL - 1, POOL, POOL + 1, POOL * 11 // 10):
        prompt = draw(rng, length)
        for send in (model.generate, model.stream, model.grpc):
            answer = send(body(prompt, {**GREEDY, "max_tokens": 4}))
            if length >= POOL:
                assert f"{length} tokens" in answer.error and f"{POOL} tokens" in answer.error
                assert "kv_cache_memory_bytes" in answer.error and answer.status in (400, None)
            else:
                assert answer.num_output == min(4, POOL - length) > 0
                same.check(prompt, answer.output_ids)
    same.finish()
    faults.assert_drained("small_pool")


def test_what_never_fits_blocks_nobody(faults: FaultServer, model: ServedModel):
    rng = random.Random(32)
    big, small = draw(rng, 400), [draw(rng, 9) for _ in range(5)]
    grows = draw(rng, 100)
    model.stream(body(big[:180], {"max_tokens": 1}))  # most of a prompt that is too large is cached
    hits = model.metric("prefix_cache_hits_total")
    with ThreadPoolExecutor(8) as pool:
        growing = pool.submit(model.stream, body(grows, {**GREEDY, "max_tokens": 500}))
        refused = [
            pool.submit(model.stream, body(prompt, {}), ENDS_BIG_WITHIN_S)
            for prompt in (big, big[: POOL + 5])
        ]
        answers = [pool.submit(model.stream, body(one, {**GREEDY, "max_tokens": 6})) for one in small]
        for each in refused:
            assert f"{POOL} tokens" in each.result().error
    same = Same(faults.oracle("small_pool"))
    for prompt, each in zip([*small, grows], [*answers, growing], strict=True):
        same.check(prompt, each.result().output_ids)
    same.finish()
    assert growing.result().finish_reason == "length"
    assert growing.result().num_output == POOL - 100
    assert growing.result().timings["num_preemptions"] <= 5, "it preempted itself"
    faults.assert_drained("small_pool")
    again = model.stream(body(big[:180], {"max_tokens": 1}))
    assert again.error is None and model.metric("prefix_cache_hits_total") >= hits


def test_two_hundred_at_once(faults: FaultServer, model: ServedModel):
    """F21 and F29: a queue far longer than the pool, each step a small part of it."""
    rng = random.Random(200)
    before = model.metric("num_preemptions_total")
    prompts = [draw(rng, rng.choice([3, 20, 60, 140])) for _ in range(200)]
    budgets = [40 if index % 4 == 0 else 1 + index % 12 for index in range(200)]
    asks = {
        str(index): body(prompt, {**GREEDY, "max_tokens": budgets[index]})
        for index, prompt in enumerate(prompts)
    }
    answers = model.grpc_together(asks)
    same = Same(faults.oracle("small_pool"))
    for index, prompt in enumerate(prompts):
        answer = answers[str(index)]
        assert answer.num_output == budgets[index] and answer.finish_reason == "length"
        same.check(prompt, answer.output_ids)
    same.finish()
    faults.assert_drained("small_pool")
    assert model.metric("num_preemptions_total") > before, "the pool was never short"


# -- F31: streams that are preempted


COUNT = 100
VARIANTS: dict[str, dict[str, object]] = {
    "greedy": GREEDY,
    "seeded": {"temperature": 1, "seed": 31, "ignore_eos": True},
    "repetition": {**GREEDY, "repetition_penalty": 1.3},
    "presence and seed": {"temperature": 1, "presence_penalty": 1.3, "seed": 32, "ignore_eos": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_preempted_streams_lose_and_repeat_nothing(faults: FaultServer, model: ServedModel, variant: str):
    rng = random.Random(variant)
    prompts = [draw(rng, 20 + 5 * index) for index in range(6)]
    settings = {**VARIANTS[variant], "max_tokens": COUNT}
    before = model.metric("num_preemptions_total")
    solo = [model.stream(body(prompt, settings)) for prompt in prompts]
    assert [each.timings["num_preemptions"] for each in solo] == [0] * 6
    asks = [body(prompt, settings) for prompt in prompts]
    asks += [body(prompts[0], {**settings, "stop": stop_after(solo[0])})]
    together = at_once(model, asks)
    assert sum(each.timings["num_preemptions"] > 0 for each in together) > 1, "the pool was never short"
    wait_until(lambda: model.metric("num_preemptions_total") > before, 2, "the metric of it")
    *streams, stopped = together
    for alone, crowded in zip(solo, streams, strict=True):
        assert crowded.output_ids == alone.output_ids and crowded.num_output == COUNT
        assert crowded.text == alone.text
    assert stopped.finish_reason == "stop"
    assert stopped.text == solo[0].text[: solo[0].text.find(stop_after(solo[0]))]
    faults.assert_drained("small_pool")


def stop_after(answer: Answer) -> str:
    """Return a stop string from the last third of the text."""
    at = len(answer.text) * 2 // 3
    return answer.text[at : at + 5]


def at_once(model: ServedModel, asks: list[dict]) -> list[Answer]:
    with ThreadPoolExecutor(len(asks)) as pool:
        return list(pool.map(model.stream, asks))


# -- F25 on the wire


def test_a_repeated_prompt_is_cached_and_answered_alike(faults: FaultServer):
    model, rng = faults.model("tiny"), random.Random(25)
    same = Same(faults.oracle("tiny"))
    for length in (5, 16, 17, 48, 100, 300):
        prompt = draw(rng, length)
        ask = {**body(prompt, {**GREEDY, "max_tokens": 8}), "cache_salt": f"{rng.random()}"}
        hits = model.metric("prefix_cache_hits_total")
        answers = [model.generate(ask), model.stream(ask), model.grpc(ask)]
        full = (length - 1) // 16 * 16
        assert [answer.cached for answer in answers][1:] == [full, full]
        for answer in answers:
            same.check(prompt, answer.output_ids)
        cached = sum(answer.cached for answer in answers)
        wait_for_metric(model, "prefix_cache_hits_total", hits + cached)
        others = model.generate({**ask, "cache_salt": "another"})
        assert others.output_ids == answers[0].output_ids
    same.finish()
