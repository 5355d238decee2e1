"""Packed rows through a worker equal transformers, for one tiny model of each family."""

from __future__ import annotations

import random

import pytest

from conch.api import Move, SamplingParams
from support.oracle import Oracle, Same
from support.tiny import FAMILIES, tiny_checkpoint
from support.worker_driver import Driver, Job, build_worker

LENGTHS = [1, 2, 5, 31, 40, 70]


def greedy_jobs(lengths, max_tokens=10, seed=0):
    rng = random.Random(seed)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return [Job(i + 1, [rng.randrange(3, 320) for _ in range(n)], params) for i, n in enumerate(lengths)]


def check(folder, jobs):
    same = Same(Oracle(folder))
    for job in jobs:
        same.check(job.prompt, job.output)
    same.finish()


@pytest.mark.parametrize("kernel", ["torch", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family, kernel):
    folder = tiny_checkpoint(family)
    jobs = greedy_jobs(LENGTHS)
    worker = build_worker(folder, attention_kernel=kernel, model_impl="transformers", num_threads=2)
    Driver(worker).run(jobs, chunk=7, stagger=2)
    check(folder, jobs)


@pytest.mark.parametrize("chunk", [1, 3, 4, 16, 1000])
def test_chunks_of_any_size(chunk):
    folder = tiny_checkpoint("mistral")
    jobs = greedy_jobs(LENGTHS)
    Driver(build_worker(folder)).run(jobs, chunk=chunk)
    check(folder, jobs)


@pytest.mark.parametrize("heads", [(9, 3), (8, 2), (6, 1), (5, 5)])
@pytest.mark.parametrize("vocab", [101, 103])
def test_odd_heads_and_vocabularies(heads, vocab):
    folder = tiny_checkpoint(
        "llama",
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        hidden_size=12 * heads[0],
        vocab_size=vocab,
    )
    jobs = greedy_jobs([3, 20])
    for job in jobs:
        job.prompt = [token % vocab for token in job.prompt]
    Driver(build_worker(folder)).run(jobs, chunk=8)
    check(folder, jobs)


ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_rope_scalings(rope):
    folder = tiny_checkpoint("llama", rope_parameters={"rope_theta": 10000.0, **rope})
    plain = Oracle(tiny_checkpoint("llama"))
    jobs = greedy_jobs([5, 150, 90])
    Driver(build_worker(folder)).run(jobs, chunk=32)
    check(folder, jobs)
    if rope["rope_type"] != "dynamic":  # the scaling matters, else this proves nothing
        assert any(plain.greedy(job.prompt, 10) != job.output for job in jobs)


@pytest.mark.parametrize(("max_model_len", "uses_long"), [(64, False), (200, True)])
def test_longrope_is_chosen_by_context(max_model_len, uses_long):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 6,
        "long_factor": [4.0] * 6,
        "original_max_position_embeddings": 64,
    }
    folder = tiny_checkpoint("phi3", rope_parameters=rope, max_position_embeddings=256)
    jobs = greedy_jobs([5, 40])
    Driver(build_worker(folder, max_model_len=max_model_len)).run(jobs, chunk=32)
    oracle = Oracle(folder)
    if uses_long:  # make transformers see a long sequence: the factors are chosen by its largest position
        original = oracle.logits
        oracle.logits = lambda ids, keep: original([*ids, *[0] * (200 - len(ids))])[: len(ids)][-keep:]
    same = Same(oracle)
    for job in jobs:
        same.check(job.prompt, job.output)
    same.finish()


def test_preempted_rows_go_on_where_they_were():
    folder = tiny_checkpoint("qwen3")
    jobs = greedy_jobs([9, 33, 17], max_tokens=16)
    driver = Driver(build_worker(folder))
    for _ in range(6):
        driver.step(jobs, 100)
    driver.preempt(jobs[1])
    driver.step([jobs[0]], 100)
    driver.run(jobs, chunk=11)
    check(folder, jobs)


def test_copied_blocks_are_independent():
    """Two choices of one prompt: the child gets the parent's full block and a copy of its last one."""
    folder = tiny_checkpoint("llama")
    driver = Driver(build_worker(folder))
    (parent,) = greedy_jobs([6])
    driver.step([parent], 100)
    child = Job(2, parent.prompt, SamplingParams(temperature=5.0, max_tokens=10, seed=1), seed=1)
    copy = driver.free.pop()
    child.blocks, child.computed = [parent.blocks[0], copy], 5
    driver.step([parent, child], 100, moves=(Move(parent.blocks[1], copy),))
    while not (parent.done and child.done):
        driver.step([job for job in (parent, child) if not job.done], 100)
    check(folder, [parent])
    oracle = Oracle(folder)
    assert child.output != parent.output
    again = Job(3, [*child.prompt, *child.output[:-1]], SamplingParams(temperature=0.0, max_tokens=1))
    Driver(build_worker(folder)).run([again])
    assert again.output == oracle.greedy(again.prompt, 1)


def test_a_plan_without_rows_is_legal():
    worker = build_worker(tiny_checkpoint("llama"))
    from conch.api import StepPlan

    assert worker.execute(StepPlan(rows=(), preempted=(5,), finished=(99,))).rows == ()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_stays_near(dtype):
    folder = tiny_checkpoint("mixtral")
    jobs = greedy_jobs([5, 40], max_tokens=4)
    Driver(build_worker(folder, dtype=dtype)).run(jobs, chunk=16)
    oracle = Oracle(folder)
    for job in jobs:
        logits = oracle.logits([*job.prompt, *job.output])[len(job.prompt) - 1 : -1]
        for row, token in zip(logits, job.output, strict=True):
            assert float(row.max() - row[token]) < 0.25
