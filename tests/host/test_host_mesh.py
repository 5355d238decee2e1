"""Real engines of several ranks behind the host: one dies under load; nothing outlives an end."""

from __future__ import annotations

import os
import random
import signal
import time

import psutil
import pytest

from conch.api import EngineConfig
from conch.host.backend import Backend
from conch.host.engine_process import engine_command
from host.conftest import LABELS
from host.host_fakes import FakePbUtils, FakeRequest, wait_until
from support.oracle import Oracle, Same
from support.own_processes import own_engines
from support.tiny import tiny_checkpoint
from support.traffic import mixed_prompts

PROMPT_ERROR_S = 15
TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
TOPOLOGIES = [
    pytest.param(TENSOR, id="tp2"),
    *(
        pytest.param(sizes, id=name, marks=pytest.mark.slow)
        for name, sizes in {
            "pp2": PIPELINE,
            "tp2_pp2": {**TENSOR, **PIPELINE},
            "dp2_tp2": {**TENSOR, "data_parallel_size": 2},
            "dp2_pp2": {**PIPELINE, "data_parallel_size": 2},
        }.items()
    ),
]


def processes(kind):
    """Processes of a kind, rank or engine, that the test has started."""
    found = []
    for each in own_engines():
        try:
            if each.status() != psutil.STATUS_ZOMBIE and f"conch.{kind}" in each.cmdline():
                found.append(each)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a backend whose engines are real; afterwards nothing of them may be left."""
    model, backends = str(tiny_checkpoint("llama", max_position_embeddings=8192)), []
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of the engines

    def make(**settings):
        config = EngineConfig(
            model=model,
            dtype="float32",
            num_threads=1,
            kv_cache_memory_bytes=32 << 20,
            distributed_timeout_seconds=600.0,  # a busy machine is no failure
            **settings,
        )
        pb_utils = FakePbUtils()
        backend = Backend(pb_utils, config, LABELS, engine_command())
        backends.append(backend)
        backend.start()
        backend.pb = pb_utils
        return backend

    yield make
    for backend in backends:
        backend.close()
    wait_until(lambda: not processes("engine") and not processes("engine.rank"), 10)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("conch-")] == []


def send(backend, token_ids, max_tokens):
    request = FakeRequest(
        input_ids=list(token_ids),
        stream=True,
        return_output_ids=True,
        sampling_parameters={"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
    )
    backend.execute([request])
    return request.sender


def output_ids(sender):
    return [token for ids in sender.all("output_ids") for token in ids]


def crowd(backend):
    """Begin streams without an end; returns when all have begun."""
    senders = [send(backend, [5 + number, 6, 7], 8000) for number in range(6)]
    wait_until(lambda: all(len(sender.responses) > 2 for sender in senders), 30)
    return senders


def ended(senders):
    return [sender for sender in senders if sender.done.is_set()]


def check_stages(backend, sizes):
    """Stages, if there are any, are on the metrics page, and so is what they idled."""
    stages = sizes.get("pipeline_parallel_size", 1)
    if stages > 1:
        name = "pipeline_stage_busy_seconds_total"
        wait_until(lambda: all(backend.pb.value(name, stage=str(stage)) > 0 for stage in range(stages)))
        for replica in range(sizes.get("data_parallel_size", 1)):
            instance = LABELS["replica"] + (f"/{replica}" if "data_parallel_size" in sizes else "")
            assert 0 < backend.pb.value("pipeline_bubble_fraction", replica=instance) < 1
    else:
        assert backend.pb.value("pipeline_bubble_fraction") == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sizes", TOPOLOGIES)
def test_a_rank_that_dies_under_load(start, sizes):
    """Its requests get prompt errors, others go on, the engine comes back, and nobody is left behind."""
    backend = start(**sizes)
    replicas = sizes.get("data_parallel_size", 1)
    expected = output_ids(send(backend, [5, 6, 7], 20).wait(30))
    senders = crowd(backend)
    check_stages(backend, sizes)
    victim, *others = processes("engine.rank")
    engine = victim.parent()
    os.kill(victim.pid, signal.SIGKILL)
    began_s = time.monotonic()
    wait_until(lambda: len(ended(senders)) == 6 // replicas, PROMPT_ERROR_S)
    for sender in ended(senders):
        assert sender.error.kind == "INTERNAL" and "rank" in sender.error.text, sender.error.text
    wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, PROMPT_ERROR_S)
    mine = [each for each in others if each.pid not in {one.pid for one in processes("engine.rank")}]
    assert len(mine) >= len(others) // replicas
    wait_until(lambda: backend.pb.value("engine_restarts_total") == 1, 120)
    wait_until(lambda: backend.pb.value("replicas_ready") == replicas, 120)
    assert time.monotonic() - began_s < 120
    assert len(ended(senders)) == 6 // replicas  # those of the other replica were not disturbed
    again = [send(backend, [5, 6, 7], 20) for _ in range(2 * replicas)]
    assert [output_ids(sender.wait(30)) for sender in again] == [expected] * len(again)
    for sender in senders:
        sender.cancelled = True
        sender.wait(30)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sizes", TOPOLOGIES)
def test_unloading_under_load_ends_all_streams_and_all_processes(start, sizes):
    backend = start(**sizes)
    senders = crowd(backend)
    assert processes("engine.rank")
    began_s = time.monotonic()
    backend.close()
    assert time.monotonic() - began_s < PROMPT_ERROR_S
    assert all(sender.wait(1).error.kind == "UNAVAILABLE" for sender in senders)
    wait_until(lambda: not processes("engine.rank") and not processes("engine"), 10)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sizes", TOPOLOGIES)
def test_an_engine_that_is_killed_takes_its_ranks_with_it(start, sizes):
    backend = start(**sizes)
    senders = crowd(backend)
    engine = processes("engine.rank")[0].parent()
    ranks = engine.children()
    assert len(ranks) == sizes.get("tensor_parallel_size", 1) * sizes.get("pipeline_parallel_size", 1) - 1
    os.kill(engine.pid, signal.SIGKILL)
    wait_until(lambda: len(ended(senders)) == 6 // sizes.get("data_parallel_size", 1), PROMPT_ERROR_S)
    wait_until(lambda: not any(rank.is_running() for rank in ranks), 10)
    for sender in senders:
        sender.cancelled = True


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_replicas_of_two_ranks_give_the_tokens_of_one_though_one_idled(start):
    backend = start(data_parallel_size=2, **TENSOR)
    by_replica = [f"{LABELS['replica']}/{index}" for index in range(2)]

    def generated():
        return [backend.pb.value("generation_tokens_total", replica=name) for name in by_replica]

    alone = output_ids(send(backend, [5, 6, 7], 30).wait(30))
    wait_until(lambda: sorted(generated()) == [0, 30])  # one idles
    prompts = [[5, 6, 7], *mixed_prompts(random.Random(5), 32, longest=60, vocab=300)]
    senders = [send(backend, prompt, 64) for prompt in prompts]
    answers = [output_ids(sender.wait(120)) for sender in senders]
    wait_until(lambda: min(generated()) > 64 * 10)  # both served
    assert answers[0][:30] == alone
    same = Same(Oracle(tiny_checkpoint("llama", max_position_embeddings=8192)))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == 64
        same.check(prompt, answer)
    same.finish()
