"""The supervisor around a real tritonserver, with a model that needs no engine.

What becomes of the processes of a conch model is in `test_serving_processes.py`.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.counting_model import write_counting_model
from support.server import RunningServer, assert_nothing_left
from support.stream_client import StreamClient, wait_until_streaming

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


def test_stop_lets_short_requests_finish(server: RunningServer) -> None:
    client = count(server, 20)
    wait_until_streaming([client])
    assert server.stop(EXIT_TIMEOUT_S + 5) == 0
    client.join(1)
    assert client.text == "".join(map(str, range(20)))


def test_second_signal_does_not_wait(tmp_path: Path, server_log: Path) -> None:
    patience_s = 40  # what one signal would grant the streams, far beyond what a busy machine needs
    repository = write_counting_model(tmp_path / "repository")
    flags = [f"--exit-timeout-secs={patience_s}"]
    with RunningServer(server_log, repository=repository, flags=flags) as server:
        streaming_clients(server)
        family = server.family()
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        asked_at = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        server.process.wait(patience_s)
        assert time.monotonic() - asked_at < patience_s / 4
        assert_nothing_left(server, family, 1)


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
