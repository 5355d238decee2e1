"""Two replicas inside one instance of a real server: one dies, the other serves on, both are there again."""

from __future__ import annotations

import re
import time
import urllib.request
from pathlib import Path

import pytest

from support.server import RunningServer, wait_until
from support.stream_client import StreamClient, wait_until_streaming
from support.tiny import tiny_checkpoint

pytestmark = pytest.mark.e2e

MODEL = "tiny"
CONTEXT = 32768
SHORT = {"text_input": "one two three", "parameters": {"max_tokens": 8, "temperature": 0, "stream": True}}
LONG = {
    "text_input": "there is a house",
    "stream": True,
    "parameters": {"max_tokens": CONTEXT, "ignore_eos": True},
}


def metric(server: RunningServer, name: str) -> dict[str, float]:
    """Read a metric's series by their label `replica`."""
    with urllib.request.urlopen(server.metrics, timeout=5) as answer:
        page = answer.read().decode()
    found = re.findall(rf'^conch:{name}{{(?:.*,)?replica="([^"]*)".*}} (\S+)$', page, re.MULTILINE)
    return {replica: float(value) for replica, value in found}


def short_text(server: RunningServer) -> str:
    client = StreamClient(server, MODEL, SHORT)
    client.join(30)
    assert client.error is None and client.ended_at is not None
    return client.text


def test_a_dead_replica_takes_only_its_own_requests_with_it(server_log: Path) -> None:
    checkpoint = tiny_checkpoint("llama", max_position_embeddings=CONTEXT)
    settings = {"data_parallel_size": 2, "kv_cache_memory_bytes": 64 << 20}
    flags = [f"--model-name={MODEL}", "--exit-timeout-secs=3"]
    with RunningServer(server_log, model=str(checkpoint), settings=settings, flags=flags) as server:
        first, second = server.engines()
        assert list(metric(server, "replicas_ready").values()) == [2]
        answer = short_text(server)
        clients = [StreamClient(server, MODEL, LONG) for _ in range(4)]
        wait_until_streaming(clients)
        wait_until(lambda: list(metric(server, "num_requests_running").values()) == [2, 2], 10, "even spread")
        first.kill()
        killed_at = time.monotonic()
        wait_until(lambda: sum(client.ended_at is not None for client in clients) == 2, 15, "prompt errors")
        assert all(client.error is not None for client in clients if client.ended_at is not None)
        assert server.is_model_ready(MODEL) and short_text(server) == answer
        wait_until(lambda: list(metric(server, "replicas_ready").values()) == [2], 60, "the replica's return")
        assert time.monotonic() - killed_at < 60 and second.is_running()
        wait_until(
            lambda: sorted(metric(server, "engine_restarts_total").values()) == [0, 1],
            10,
            "the restart's count",
        )
        more = [StreamClient(server, MODEL, LONG) for _ in range(2)]
        wait_until_streaming(more)
        wait_until(lambda: list(metric(server, "num_requests_running").values()) == [2, 2], 10, "even spread")
