"""The supervisor around a real tritonserver: F01, F02 and F09, with a model that needs no engine."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.counting_model import write_counting_model
from support.server import RunningServer, are_gone, assert_nothing_left, wait_until
from support.stream_client import StreamClient, assert_all_end, wait_until_streaming

pytestmark = pytest.mark.e2e

FOR_EVER = 100_000
EXIT_TIMEOUT_S = 2


@pytest.fixture
def server(tmp_path: Path, server_log: Path) -> Iterator[RunningServer]:
    repository = write_counting_model(tmp_path / "repository")
    flags = [f"--exit-timeout-secs={EXIT_TIMEOUT_S}"]
    with RunningServer(server_log, repository=repository, flags=flags) as running:
        yield running


def count(server: RunningServer, limit: int) -> StreamClient:
    return StreamClient(server, "counter", {"text_input": str(limit)})


def streaming_clients(server: RunningServer) -> list[StreamClient]:
    clients = [count(server, FOR_EVER) for _ in range(4)]
    wait_until_streaming(clients)
    return clients


def assert_counts(server: RunningServer) -> None:
    client = count(server, 3)
    client.join(10)
    assert client.text == "012"


@pytest.mark.parametrize("victim", ["stub", "tritonserver"])
def test_death_ends_streams_at_once_and_is_repaired(server: RunningServer, victim: str) -> None:
    clients = streaming_clients(server)
    lost = server.family()[1:]
    target = server.stubs()[0] if victim == "stub" else server.tritonserver()
    killed_at = time.monotonic()
    target.kill()
    wait_until(lambda: not server.is_model_ready("counter"), 10, "readiness turning false")
    assert_all_end(clients, killed_at, 15)
    wait_until(server.is_ready, 30, "server that is ready again")
    assert_counts(server)
    assert are_gone(lost), "the old server's processes are still there"
    assert len(server.shared_memory()) == 1


def test_stop_when_idle_leaves_nothing(server: RunningServer) -> None:
    family = server.family()
    assert len(family) > 3 and server.shared_memory(), "server, stub and region should be there"
    assert server.stop(EXIT_TIMEOUT_S + 5) == 0
    assert_nothing_left(server, family, 1)


def test_stop_while_streaming_is_bounded(server: RunningServer) -> None:
    clients = streaming_clients(server)
    family = server.family()
    assert server.stop(EXIT_TIMEOUT_S + 5) == 0
    assert_all_end(clients, time.monotonic(), 1)
    assert_nothing_left(server, family, 1)


def test_stop_lets_short_requests_finish(server: RunningServer) -> None:
    client = count(server, 20)
    wait_until_streaming([client])
    assert server.stop(EXIT_TIMEOUT_S + 5) == 0
    client.join(1)
    assert client.text == "".join(map(str, range(20)))


def test_second_signal_does_not_wait(server: RunningServer) -> None:
    streaming_clients(server)
    family = server.family()
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    asked_at = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    server.process.wait(EXIT_TIMEOUT_S)
    assert time.monotonic() - asked_at < EXIT_TIMEOUT_S
    assert_nothing_left(server, family, 1)


def test_killed_supervisor_takes_everything_with_it(server: RunningServer) -> None:
    clients = streaming_clients(server)
    family = server.family()
    server.process.kill()
    server.process.wait()
    assert_nothing_left(server, family, 10)
    assert_all_end(clients, time.monotonic(), 1)


def test_supervisor_is_idle_when_nothing_happens(server: RunningServer) -> None:
    supervisor = psutil.Process(server.process.pid)
    before = supervisor.cpu_times()
    time.sleep(4)
    after = supervisor.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.03 * 4


def test_taken_port_is_named(server: RunningServer, tmp_path: Path) -> None:
    other = RunningServer(tmp_path / "other.log", repository=tmp_path / "repository")
    other.command += [f"--http-port={server.ports['http']}"]
    other.launch()
    assert other.process.wait(20) == 1
    assert f":{server.ports['http']} " in other.log and "--http-port" in other.log


def test_model_that_does_not_load_is_explained(tmp_path: Path, server_log: Path) -> None:
    failing = RunningServer(server_log, repository=write_counting_model(tmp_path / "repository", fails=True))
    failing.launch()
    try:
        assert failing.process.wait(60) == 1
    except subprocess.TimeoutExpired:
        failing.stop()
        raise
    last = failing.log[failing.log.rindex("conch: error:") :]
    assert "counter" in last and "no counting today" in last
    assert not failing.shared_memory()
