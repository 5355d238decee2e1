"""Unloading and loading under explicit model control: F08."""

from __future__ import annotations

import threading

import psutil
import pytest

from support.lab import Lab
from support.leaving import HttpLeaver
from support.server import are_gone, wait_until
from support.stream_client import StreamClient, wait_until_streaming
from support.wire import ServedModel

pytestmark = pytest.mark.e2e

CYCLES = 5
MEMORY_SLACK_MB = 8
LONG = {"text_input": "there is a house", "parameters": {"max_tokens": 1500, "ignore_eos": True}}


def server_memory_mb(lab: Lab) -> float:
    memory = lab.server.tritonserver().memory_info()
    return (memory.rss - memory.shared) / (1 << 20)


def new_processes(lab: Lab, before: set[int]) -> list[psutil.Process]:
    return [p for p in lab.server.family() if p.pid not in before]


def use_and_leave(lab: Lab, model: ServedModel) -> None:
    """One complete stream, and two that their clients leave.

    Over HTTP: see `Lab.loaded` for what Triton does to cancelled gRPC streams.
    """
    lab.assert_canary(model)
    for _ in range(2):
        client = HttpLeaver(model, LONG)
        client.read_events(2)
        client.leave()


def test_a_model_is_unloaded_whole_again_and_again(lab: Lab, tiny: ServedModel) -> None:
    """The process that holds the weights is gone each time, and the server does not grow."""
    model = ServedModel(lab.server, "single")
    before = {p.pid for p in lab.server.family()}
    sizes = []
    for _ in range(CYCLES):
        lab.load("single")
        own = new_processes(lab, before)
        assert len(own) == 2, "stub and engine"
        use_and_leave(lab, model)
        lab.unload("single")
        lab.wait_until_unloaded("single")
        wait_until(lambda own=own: are_gone(own), 5, "end of stub and engine")
        sizes.append(server_memory_mb(lab))
    assert sizes[-1] - sizes[0] <= MEMORY_SLACK_MB, sizes
    lab.assert_canary(tiny)
    assert len(lab.server.shared_memory()) == 1


def test_unloading_ends_streams_and_refuses_new_requests(lab: Lab, tiny: ServedModel) -> None:
    model = ServedModel(lab.server, "single")
    before = {p.pid for p in lab.server.family()}
    lab.load("single")
    own = new_processes(lab, before)
    clients = [StreamClient(lab.server, "single", {**LONG, "stream": True}) for _ in range(3)]
    wait_until_streaming(clients[:1])
    unloading = threading.Thread(target=lab.unload, args=("single",))
    unloading.start()
    wait_until(lambda: not lab.server.is_model_ready("single"), 10, "refusal of readiness")
    assert any(client.ended_at is None for client in clients), "nothing was in flight while it unloaded"
    for ask in (model.generate, model.stream, model.grpc):
        error = ask(LONG).error
        assert error is not None and ("not ready" in error or "no available versions" in error), error
    lab.wait_until_unloaded("single")
    unloading.join(30)
    for client in clients:
        client.join(1)
        assert client.ended_at is not None
        ended = client.events[-1]
        assert "error" in ended or len(client.events) > 2
    wait_until(lambda: are_gone(own), 5, "end of stub and engine")
    lab.assert_canary(tiny)
