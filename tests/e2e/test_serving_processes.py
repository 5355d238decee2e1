"""Death of any process of a served conch model: F01, F02 and F09 with a real engine behind Triton."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.server import RunningServer, are_gone, assert_nothing_left, wait_until
from support.stream_client import StreamClient, assert_all_end, wait_until_streaming
from support.tiny import tiny_checkpoint

pytestmark = pytest.mark.e2e

MODEL = "tiny"
CONTEXT = 8192
EXIT_TIMEOUT_S = 3
CANARY = {"text_input": "one two three", "parameters": {"max_tokens": 8, "temperature": 0, "stream": True}}
LONG = {
    "text_input": "there is a house",
    "parameters": {"max_tokens": CONTEXT - 100, "ignore_eos": True, "stream": True},
}
LONG_PROMPT = {
    "text_input": "a b c d e f g h " * 480,
    "parameters": {"max_tokens": CONTEXT, "ignore_eos": True, "stream": True},
}


@pytest.fixture
def server(server_log: Path) -> Iterator[RunningServer]:
    checkpoint = tiny_checkpoint("llama", max_position_embeddings=CONTEXT)
    flags = [f"--model-name={MODEL}", f"--exit-timeout-secs={EXIT_TIMEOUT_S}"]
    settings = {"num_threads": 1, "kv_cache_memory_bytes": 64 << 20}
    with RunningServer(server_log, model=str(checkpoint), settings=settings, flags=flags) as running:
        yield running


def canary(server: RunningServer, timeout_s: float = 10.0) -> str | None:
    """Return the canary's text, None if it failed."""
    client = StreamClient(server, MODEL, CANARY)
    client.join(timeout_s)
    assert client.ended_at is not None, "the canary hangs"
    failed = not client.events or any("error" in event for event in client.events)
    return None if failed else client.text


def streams(server: RunningServer, count: int = 4) -> list[StreamClient]:
    clients = [StreamClient(server, MODEL, LONG) for _ in range(count)]
    wait_until_streaming(clients)
    return clients


@pytest.mark.parametrize("victim", ["engine", "stub", "tritonserver"])
def test_death_is_told_at_once_and_repaired(server: RunningServer, victim: str) -> None:
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
    assert_all_end(clients, killed_at, 15)
    recovered = False
    while not recovered:
        assert time.monotonic() - killed_at < 60, "no recovery"
        ready = server.is_model_ready(MODEL)
        text = canary(server, 15)
        late = time.monotonic() - killed_at > 10
        assert not (late and ready and text is None), "ready is said while nothing is served"
        recovered = ready and text is not None
    assert text == answer
    gone = [target] if victim == "engine" else below
    wait_until(lambda: are_gone(gone), 5, "end of the old processes")
    assert len(server.engines()) == 1 and len(server.shared_memory()) == 1


@pytest.mark.parametrize("state", ["idle", "decoding", "prefilling"])
def test_stop_is_bounded_and_leaves_nothing(server: RunningServer, state: str) -> None:
    clients = []
    if state == "decoding":
        clients = streams(server)
    elif state == "prefilling":
        clients = [StreamClient(server, MODEL, LONG_PROMPT) for _ in range(4)]
        time.sleep(0.2)
        assert not any(client.ended_at for client in clients)
    family = server.family()
    assert len(family) >= 4, "supervisor, server, stub and engine should be there"
    assert server.stop(EXIT_TIMEOUT_S + 5) == 0
    assert_all_end(clients, time.monotonic(), 1)
    assert all("error" in client.events[-1] for client in clients), "an end without a word"
    assert_nothing_left(server, family, 1)


def test_killed_supervisor_takes_everything_with_it(server: RunningServer) -> None:
    clients = streams(server)
    family: list[psutil.Process] = server.family()
    server.process.kill()
    server.process.wait()
    assert_nothing_left(server, family, 10)
    assert_all_end(clients, time.monotonic(), 1)
