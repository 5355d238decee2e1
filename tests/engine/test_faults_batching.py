"""F44: a request's answer does not depend on who shares its batch, nor on the order."""

from __future__ import annotations

import random

from conch.api import EngineConfig, SamplingParams
from conch.engine.local import LocalEngine
from support.tiny import tiny_checkpoint

COUNT = 24
GREEDY = {"temperature": 0.0}
SETTINGS = [
    GREEDY,
    {**GREEDY, "repetition_penalty": 1.3},
    {**GREEDY, "presence_penalty": 2.0},
    {**GREEDY, "frequency_penalty": 2.0},
    {"top_k": 5, "seed": 1},
    {"top_p": 0.3, "seed": 2},
    {"min_p": 0.2, "seed": 3},
    {**GREEDY, "logit_bias": {17: 4.0, 18: -4.0}},
    {**GREEDY, "logit_bias": dict.fromkeys(range(100, 320), -100.0)},
    {**GREEDY, "min_tokens": 20, "stop_token_ids": tuple(range(3, 160))},
    {**GREEDY, "stop_token_ids": tuple(range(3, 40))},
    {"temperature": 0.7, "seed": 4, "repetition_penalty": 0.8, "logprobs": 2},
    {"temperature": 1.5, "seed": 5},
    {**GREEDY, "logprobs": 0},
]


def answer_of(outputs) -> tuple:
    logprobs = tuple(round(entry.logprob, 3) for output in outputs for entry in output.logprobs or ())
    tokens = tuple(token for output in outputs for token in output.token_ids)
    return tokens, outputs[-1].finish_reason, logprobs


def serve(engine: LocalEngine, jobs, joins) -> dict[int, tuple]:
    """Serve jobs by number; the i-th of them joins at step ``joins[i]``."""
    waiting = sorted(zip(joins, range(len(jobs)), strict=True), reverse=True)
    numbers, outputs, step = {}, {}, 0
    while waiting or engine.has_work:
        while waiting and waiting[-1][0] <= step:
            number, prompt, params = jobs[waiting.pop()[1]]
            numbers[engine.add(prompt, params)] = number
        for output in engine.step():
            assert output.failure is None
            outputs.setdefault(numbers[output.request_id], []).append(output)
        step += 1
    return {number: answer_of(mine) for number, mine in outputs.items()}


def test_answers_do_not_depend_on_the_batch():
    rng = random.Random(44)
    prompt = [rng.randrange(3, 320) for _ in range(9)]
    params = [SamplingParams(max_tokens=COUNT, ignore_eos=True, **said) for said in SETTINGS]
    jobs = [(number, prompt, wanted) for number, wanted in enumerate(params)]
    config = EngineConfig(
        model=str(tiny_checkpoint("llama")),
        dtype="float32",
        num_threads=1,
        num_gpu_blocks_override=200,
        seed=1,
    )
    with LocalEngine(config) as engine:
        solo: dict[int, tuple] = {}
        for job in jobs:
            solo.update(serve(engine, [job], [0]))
        differing = {answer[0] for answer in solo.values()}
        assert len(differing) >= len(SETTINGS) - 2, "settings that change nothing prove nothing"
        for _ in range(10):
            order = rng.sample(jobs, len(jobs))
            joins = [rng.randrange(0, 12) for _ in order]
            assert serve(engine, order, joins) == solo
        assert engine.stats().kv_blocks_used == 0
