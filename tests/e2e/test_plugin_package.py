"""Somebody else's package, installed with pip and chosen by name, changes the order of service."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conch.host.serving.repository import ModelEntry, write_model
from support.lab import load
from support.leaving import HttpLeaver
from support.server import RunningServer, wait_until
from support.stream_client import StreamClient
from support.tiny import tiny_checkpoint
from support.wire import ServedModel

pytestmark = pytest.mark.e2e

PACKAGE = Path(__file__).resolve().parents[1] / "plugin_packages" / "shortest_first"
ENDLESS = {"text_input": "there is a house", "parameters": {"max_tokens": 10_000, "ignore_eos": True}}
SCHEDULERS = {"by_arrival": "fcfs", "by_length": "shortest_first"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the package is installed, and this one as it was."""
    folder = tmp_path_factory.mktemp("plugin")
    source, target = folder / "source", folder / "installed"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, f"--target={target}", source],
        check=True,
        timeout=120,
    )
    paths = [str(target), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[RunningServer]:
    """Two models that differ in nothing but the scheduler, with one seat each."""
    folder = tmp_path_factory.mktemp("schedulers")
    settings = {
        "model": str(tiny_checkpoint("llama", max_position_embeddings=16_000)),
        "max_num_seqs": 1,
        "num_threads": 1,
        "kv_cache_memory_bytes": 16 << 20,
    }
    for name, scheduler in SCHEDULERS.items():
        write_model(folder / "models", ModelEntry(name, {**settings, "scheduler": scheduler}))
    log = folder / "server.log"
    with RunningServer(log, repository=folder / "models", environment=environment) as running:
        yield running


def order_of_service(model: ServedModel) -> list[str]:
    """Queue a long prompt and then a short one behind a third request; return them as they end."""
    first = HttpLeaver(model, ENDLESS)
    first.read_events(1)
    clients = {}
    for name, prompt in (("long", "a b c d e f g h " * 20), ("short", "a")):
        request = {
            "text_input": prompt,
            "stream": True,
            "parameters": {"max_tokens": 300, "ignore_eos": True},
        }
        clients[name] = StreamClient(model.server, model.name, request)
        wait_until(lambda: load(model)[:2] == (1, len(clients)), 10, f"{name} prompt in the queue")
    first.leave()
    for client in clients.values():
        client.join(60)
        assert client.ended_at is not None and "error" not in client.events[-1]
    return sorted(clients, key=lambda name: clients[name].ended_at)


def test_the_package_changes_the_order_of_service(server: RunningServer) -> None:
    assert order_of_service(ServedModel(server, "by_arrival")) == ["long", "short"]
    assert order_of_service(ServedModel(server, "by_length")) == ["short", "long"]


def test_it_is_listed_with_package_and_version(environment: dict[str, str]) -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "conch.cli", "plugins"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, **environment, "COLUMNS": "200"},
    ).stdout
    (line,) = [line for line in listed.splitlines() if "shortest_first" in line]
    assert "scheduler" in line and "conch-shortest-first" in line and "1.0.0" in line


def test_this_environment_does_not_have_it() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "conch.cli", "plugins"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert "fcfs" in listed and "shortest_first" not in listed
