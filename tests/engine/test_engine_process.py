"""The engine as a process: it starts, answers, and never outlives the one it works for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

from conch.api import EngineConfig, SamplingParams
from conch.engine.protocol import AddRequest, EngineFailed, EngineReady, Progress, StepNews, StopEngine
from support.engine_process import EngineProcess
from support.server import wait_until
from support.tiny import tiny_checkpoint


@contextmanager
def running():
    config = EngineConfig(model=str(tiny_checkpoint("llama")), dtype="float32", num_gpu_blocks_override=64)
    engine = EngineProcess(config)
    try:
        yield engine
    finally:
        engine.process.kill()
        engine.process.wait()


@pytest.fixture(scope="module")
def engine():
    """One that serves until the test that stops it."""
    with running() as one:
        yield one


def test_it_tells_its_stats_when_it_falls_idle(engine):
    assert isinstance(engine.first, EngineReady)
    assert engine.first.num_blocks == 64
    assert engine.receive().stats.kv_blocks_total == 64
    engine.end.send(AddRequest(request_id=1, token_ids=(5,), params=SamplingParams(max_tokens=2)))
    news = engine.receive()
    while news.stats is None or news.stats.running:
        news = engine.receive()
    assert isinstance(news, StepNews)
    assert news.stats.generation_tokens in (1, 2)
    assert news.stats.kv_blocks_used == 0


def test_it_burns_nothing_while_idle(engine):
    process = psutil.Process(engine.process.pid)
    time.sleep(0.2)
    before = process.cpu_times()
    time.sleep(1.0)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.03


def test_it_serves_and_stops(engine):
    engine.end.send(AddRequest(request_id=7, token_ids=(5, 6, 7), params=SamplingParams(max_tokens=3)))
    outputs = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += engine.receive(Progress).outputs
    assert {output.request_id for output in outputs} == {7}
    assert outputs[-1].usage.num_output == sum(len(output.token_ids) for output in outputs)
    engine.end.send(StopEngine())
    assert engine.process.wait(timeout=10) == 0


def test_it_ends_when_the_host_hangs_up():
    with running() as engine:
        engine.end.close()
        assert engine.process.wait(timeout=10) == 0


def test_it_dies_with_its_parent():
    """Even while it imports torch."""
    script = (
        "import socket, subprocess, sys, time\n"
        "ours, theirs = socket.socketpair()\n"
        "p = subprocess.Popen([sys.executable, '-m', 'conch.engine', '--fd', str(theirs.fileno())],"
        " pass_fds=[theirs.fileno(), ours.fileno()])\n"  # the child holds our end too: no end-of-file comes
        "print(p.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    wait_until(lambda: any("libtorch" in each.path for each in child.memory_maps()), 30, "import of torch")
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    child.wait(timeout=10)


def test_a_model_that_is_not_there_is_a_message_not_a_riddle():
    engine = EngineProcess(EngineConfig(model="/nowhere/at/all"))
    assert isinstance(engine.first, EngineFailed)
    assert "/nowhere/at/all" in engine.first.message
    assert engine.process.wait(timeout=10) == 1
