"""Death and stop of each process of a served model: F01, F02 and F09 with a real engine behind Triton."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from support.leaving import HttpLeaver
from support.server import RunningServer, are_gone, assert_nothing_left, wait_until
from support.stream_client import StreamClient, assert_all_end, wait_until_streaming
from support.tiny import tiny_checkpoint
from support.wire import ServedModel

pytestmark = pytest.mark.e2e

MODEL = "tiny"
CONTEXT = 32768
EXIT_TIMEOUT_S = 3
ENVIRONMENTS = Path("/tmp")
CANARY = {"text_input": "one two three", "parameters": {"max_tokens": 8, "temperature": 0, "stream": True}}
ENDLESS = {"max_tokens": CONTEXT, "ignore_eos": True}
LONG = {"text_input": "there is a house", "stream": True, "parameters": ENDLESS}
LONG_PROMPT = {"text_input": "a b c d e f g h " * 480, "stream": True, "parameters": ENDLESS}


def tiny_server(log: Path) -> RunningServer:
    checkpoint = tiny_checkpoint("llama", max_position_embeddings=CONTEXT)
    flags = [f"--model-name={MODEL}", f"--exit-timeout-secs={EXIT_TIMEOUT_S}"]
    settings = {"num_threads": 1, "kv_cache_memory_bytes": 64 << 20}
    return RunningServer(log, model=str(checkpoint), settings=settings, flags=flags)


@pytest.fixture(scope="module")
def lasting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One that is there again after each test, whatever of it is killed."""
    with tiny_server(tmp_path_factory.mktemp("lasting") / "server.log") as running:
        yield running


@pytest.fixture
def server(server_log: Path) -> Iterator[RunningServer]:
    with tiny_server(server_log) as running:
        yield running


def canary(server: RunningServer, timeout_s: float = 15.0) -> str | None:
    """Return the canary's text, None if it failed; it never hangs."""
    client = StreamClient(server, MODEL, CANARY)
    client.join(timeout_s)
    assert client.ended_at is not None, "the canary hangs"
    failed = client.error is not None or not client.events
    return None if failed else client.text


def readiness(server: RunningServer) -> set[bool]:
    """Ask in all the ways there are whether the model is served."""
    with grpc.InferenceServerClient(server.grpc) as client:
        try:
            over_grpc = client.is_model_ready(MODEL, client_timeout=2)
        except InferenceServerException:
            over_grpc = False
    return {server.is_ready(), server.is_model_ready(MODEL), over_grpc}


def streams(server: RunningServer, count: int = 4) -> list[StreamClient]:
    clients = [StreamClient(server, MODEL, LONG) for _ in range(count)]
    wait_until_streaming(clients)
    return clients


def assert_all_fail(clients: list[StreamClient], since: float, within_s: float) -> None:
    """Each ends with an error: of the server's, or a connection that is closed on it."""
    assert_all_end(clients, since, within_s)
    assert all(client.error is not None for client in clients)


@pytest.mark.parametrize("victim", ["engine", "stub", "tritonserver"])
def test_death_is_told_at_once_and_repaired(lasting_server: RunningServer, victim: str) -> None:
    server = lasting_server
    wait_until(lambda: readiness(server) == {True}, 60, "server as it should be")
    answer = canary(server)
    assert answer
    clients = streams(server)
    below = server.family()[1:]
    (target,) = {
        "engine": server.engines,
        "stub": server.stubs,
        "tritonserver": lambda: [server.tritonserver()],
    }[victim]()
    killed_at = time.monotonic()
    target.kill()
    assert_all_fail(clients, killed_at, 15)
    good_polls = 0
    while good_polls < 4:
        assert time.monotonic() - killed_at < 60, "no recovery"
        ready, text = readiness(server), canary(server)
        if True in ready and text is None:  # gRPC opens a moment before HTTP: the same second counts
            time.sleep(0.5)
            text = canary(server)
        is_late = time.monotonic() - killed_at > 10
        assert not (is_late and True in ready and text is None), "ready is said while nothing is served"
        good_polls = good_polls + 1 if ready == {True} and text is not None else 0
        time.sleep(0.25)
    assert text == answer
    gone = [target] if victim == "engine" else below
    wait_until(lambda: are_gone(gone), 5, "end of the old processes")
    assert len(server.engines()) == 1 and len(server.shared_memory()) == 1


def test_stop_when_idle_leaves_nothing(lasting_server: RunningServer) -> None:
    """The last test that needs it."""
    wait_until(lambda: readiness(lasting_server) == {True}, 60, "server as it should be")
    assert_stop_leaves_nothing(lasting_server)


def test_stop_when_busy_is_bounded_and_leaves_nothing(server: RunningServer) -> None:
    """Some decode, some prefill, one has stopped reading: all are told, none is waited for too long."""
    clients = streams(server)
    half_read = HttpLeaver(ServedModel(server, MODEL), LONG)
    half_read.read_events(1)
    clients += [StreamClient(server, MODEL, LONG_PROMPT) for _ in range(4)]
    time.sleep(0.2)
    assert not any(client.ended_at for client in clients)
    assert_stop_leaves_nothing(server)
    assert_all_fail(clients, time.monotonic(), 1)
    assert half_read.read_to_the_end(), "it should have been left with a closed connection"


def assert_stop_leaves_nothing(server: RunningServer) -> None:
    family = server.family()
    names = [process.name() for process in family]
    assert "tritonserver" in names and "triton_python_backend_stub" in names and len(family) >= 4
    assert server.shared_memory() and environments()
    before = environments()
    assert server.stop(EXIT_TIMEOUT_S + 5) == 0
    assert_nothing_left(server, family, 1)
    assert len(environments() & before) < len(before), "the folder in /tmp is left"


def environments() -> set[Path]:
    """Folders that Triton's Python backend makes; other servers on this machine have theirs."""
    return set(ENVIRONMENTS.glob("python_env_*"))


def test_killed_supervisor_takes_everything_with_it(server: RunningServer) -> None:
    clients = streams(server)
    family: list[psutil.Process] = server.family()
    server.process.kill()
    server.process.wait()
    assert_nothing_left(server, family, 10)
    assert_all_fail(clients, time.monotonic(), 1)
