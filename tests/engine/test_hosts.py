"""A mesh over several hosts, and what becomes of it when a rank or the cable between them fails."""

from __future__ import annotations

import itertools
import queue
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

from conch.api import ConfigError, EngineConfig, SamplingParams
from conch.api.mesh import MeshError
from conch.engine.local import LocalEngine
from conch.engine.protocol import AddRequest, EngineFailed, EngineReady, StepNews, StopEngine
from conch.host.engine_client import EngineClient
from conch.host.engine_process import engine_command
from conch.host.shares import EngineShare
from support.engine_process import EngineProcess, ranks_of
from support.hosts import TwoHosts
from support.oracle import Oracle, Same
from support.own_processes import own_engines
from support.tiny import tiny_checkpoint
from support.traffic import mixed_prompts

PATIENCE_S = 240
"""Other tests may keep the machine busy while an engine starts."""
LONGER_THAN_A_TEST_S = 3600
TOKEN = "a secret that is long enough"


def mesh_config(folder, tensor=2, pipeline=1, **settings):
    return EngineConfig(
        model=str(folder),
        dtype="float32",
        num_threads=1,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=64,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        **settings,
    )


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


@pytest.fixture
def port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def rank_command(where, *options):
    return [sys.executable, "-m", "conch.cli", "rank", "--rdzv", where, *map(str, options)]


@contextmanager
def running(command):
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        process.communicate()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, "a rank has outlived the command that started it"


def greedy(budget):
    return SamplingParams(temperature=0.0, max_tokens=budget, ignore_eos=True)


def check_same(engine, folder, vocab=320):
    prompts = mixed_prompts(random.Random(1), 6, longest=40, vocab=vocab)
    same = Same(Oracle(folder))
    same.check_all(prompts, [12] * len(prompts), engine.answers(prompts, 12))


def test_two_hosts_give_the_tokens_of_one_notice_a_cut_and_meet_again(tmp_path, token_file):
    folder = tiny_checkpoint("llama")
    elsewhere = shutil.copytree(folder, tmp_path / "elsewhere")
    with TwoHosts() as hosts:
        here, there = hosts.addresses
        settings = {"remote_ranks": 1, "master_addr": here, "rank_token_file": str(token_file)}
        command = rank_command(f"{here}:29501", "--forever", "--model", elsewhere, "--token-file", token_file)
        with running([*hosts.within(1), *command]):
            engine = EngineProcess(mesh_config(folder, tensor=2, **settings), hosts.within(0))
            assert isinstance(engine.first, EngineReady), engine.first
            assert not ranks_of(engine.process.pid), "the other rank runs on the other host"
            check_same(engine, folder)

            engine.begin([5, 6, 7], budget=400)
            while not engine.receive().outputs:
                pass
            hosts.cut()
            began = time.monotonic()
            failed = engine.receive(StepNews)
            assert time.monotonic() - began < 15
            assert isinstance(failed, EngineFailed)
            found = rf"rank 1 of the mesh \(process \d+ of {re.escape(there)}\) has shown no sign of life"
            assert re.search(found, failed.message), failed.message
            assert engine.process.wait(timeout=10) == 1

            hosts.mend()
            engine = EngineProcess(mesh_config(folder, tensor=1, pipeline=2, **settings), hosts.within(0))
            assert isinstance(engine.first, EngineReady), engine.first
            check_same(engine, folder)
            engine.end.send(StopEngine())
            assert engine.process.wait(timeout=10) == 0


class Events:
    """What the host of an engine hears."""

    def __init__(self):
        self.heard = queue.Queue()
        self.outputs = queue.Queue()

    def news(self, news):
        for output in news.outputs:
            self.outputs.put(output)

    def engine_up(self, session):
        self.heard.put(session)

    def engine_down(self, session, error):
        self.heard.put(error)

    def engine_given_up(self, reason):
        pass  # on a slow machine it may well take longer to come back than a client should wait


@contextmanager
def kept_running(config):
    events = Events()
    client = EngineClient(EngineShare(config), events, engine_command(), itertools.count(1))
    client.start()
    try:
        client.wait()
        yield events
    finally:
        client.close()
    assert not own_engines(), "an engine has outlived its host"


def the_engine():
    (engine,) = (process for process in own_engines() if "conch.engine.rank" not in process.cmdline())
    return engine


def the_rank():
    (rank,) = ranks_of(the_engine().pid)
    return rank


def generate(events, session, prompt, budget):
    session.send(AddRequest(request_id=1, token_ids=tuple(prompt), params=greedy(budget)))
    tokens = []
    while len(tokens) < budget:
        output = events.outputs.get(timeout=PATIENCE_S)
        assert output.failure is None, output.failure
        tokens += output.token_ids
    return tokens


def test_a_rank_killed_while_nothing_runs_ends_the_engine_and_no_rank_outlives_one_that_is_killed():
    folder = tiny_checkpoint("llama")
    with kept_running(mesh_config(folder)) as events:
        events.heard.get(timeout=PATIENCE_S)
        rank = the_rank()
        rank.kill()
        error = events.heard.get(timeout=10)
        assert f"rank 1 of the mesh (process {rank.pid}) was killed by signal 9" in str(error)
        session = events.heard.get(timeout=PATIENCE_S)
        assert generate(events, session, [5, 6, 7], 8) == Oracle(folder).greedy([5, 6, 7], 8)

        rank = the_rank()
        session.send(AddRequest(request_id=2, token_ids=(5,), params=greedy(400)))
        events.outputs.get(timeout=PATIENCE_S)
        the_engine().kill()
        rank.wait(timeout=10)


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_step_ends_the_engine_and_it_comes_back():
    folder = tiny_checkpoint("llama")
    with kept_running(mesh_config(folder)) as events:
        session = events.heard.get(timeout=PATIENCE_S)
        session.send(AddRequest(request_id=1, token_ids=(5,), params=greedy(400)))
        events.outputs.get(timeout=PATIENCE_S)
        rank = the_rank()
        rank.suspend()
        error = events.heard.get(timeout=15)
        found = f"rank 1 of the mesh (process {rank.pid}) has shown no sign of life for 10 s"
        assert found in str(error), error
        assert not rank.is_running()
        session = events.heard.get(timeout=PATIENCE_S)
        events.outputs = queue.Queue()
        assert generate(events, session, [5, 6, 7], 8) == Oracle(folder).greedy([5, 6, 7], 8)


def awaiting(folder, port, token_file, **settings):
    return mesh_config(
        folder,
        remote_ranks=1,
        master_addr="127.0.0.1",
        master_port=port,
        rank_token_file=str(token_file),
        **settings,
    )


def test_a_rank_that_does_not_come_is_missed_by_name(port, token_file):
    config = awaiting(tiny_checkpoint("llama"), port, token_file, distributed_timeout_seconds=0.5)
    missing = rf"1 of 2 ranks .*\(0.5\); missing: 1 \(from another host, to 127.0.0.1:{port}\)"
    with pytest.raises(MeshError, match=missing):
        LocalEngine(config)
    with socket.socket() as sock:
        assert sock.connect_ex(("127.0.0.1", port)) != 0, "somebody still listens"


def test_a_port_that_is_taken_is_refused(token_file):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at master_addr 127.0.0.1, master_port {port}"):
            LocalEngine(awaiting(tiny_checkpoint("llama"), port, token_file))


def test_another_checkpoint_is_refused_and_says_what_differs(port, token_file):
    other = tiny_checkpoint("llama", seed=1)
    command = rank_command(f"127.0.0.1:{port}", "--model", other, "--token-file", token_file)
    found = r"rank 1 of the mesh \(process \d+ of 127.0.0.1\) failed: CheckpointError: .* other weights$"
    patient = {"distributed_timeout_seconds": LONGER_THAN_A_TEST_S}
    with running(command) as unlike:
        with pytest.raises(MeshError, match=found):
            LocalEngine(awaiting(tiny_checkpoint("llama"), port, token_file, **patient))
        assert unlike.wait(timeout=PATIENCE_S) == 1


@pytest.mark.slow
def test_torchrun_starts_ranks_again_when_one_of_them_has_died(port, token_file):
    folder = tiny_checkpoint("llama")
    config = mesh_config(
        folder,
        tensor=2,
        pipeline=2,
        remote_ranks=2,
        master_addr="127.0.0.1",
        master_port=port,
        rank_token_file=str(token_file),
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3"]
    command = [*launcher, "--no-python", "--", *rank_command(f"127.0.0.1:{port}", "--token-file", token_file)]
    with running(command) as launched:
        engine = EngineProcess(config)
        assert isinstance(engine.first, EngineReady), engine.first
        assert len(ranks_of(engine.process.pid)) == 1
        check_same(engine, folder)
        remote = [
            each
            for each in psutil.Process(launched.pid).children(recursive=True)
            if "conch.engine.rank" in " ".join(each.cmdline()) and "--rank=1" in each.cmdline()
        ]
        remote[0].kill()
        failed = engine.receive(StepNews)
        named = rf"rank 3 of the mesh \(process {remote[0].pid} \(GROUP_RANK 0, LOCAL_RANK 1\) of 127.0.0.1\)"
        assert re.search(f"{named} has hung up", failed.message), failed.message
        assert engine.process.wait(timeout=10) == 1
        engine = EngineProcess(config)
        assert isinstance(engine.first, EngineReady), engine.first
        check_same(engine, folder)
        engine.end.send(StopEngine())
        assert engine.process.wait(timeout=10) == 0
        assert launched.wait(timeout=60) == 0
