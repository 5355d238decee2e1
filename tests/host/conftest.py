from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from conch.api.config import EngineConfig
from conch.host.backend import Backend
from host.host_fakes import FakePbUtils, FakeRequest, write_checkpoint

LABELS = {"model": "tiny", "version": "1", "replica": "tiny_0_0"}
FAKE_ENGINE = (sys.executable, str(Path(__file__).with_name("fake_engine_process.py")))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder)
    return folder


@pytest.fixture
def make_backend(checkpoint):
    """Start backends over the fake engine; they are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(pb_utils=None, folder=checkpoint, instance=None, **settings):
            pb_utils = pb_utils or FakePbUtils()
            config = EngineConfig(model=str(folder), **settings)
            backend = Backend(pb_utils, config, LABELS, FAKE_ENGINE, instance)
            stack.callback(backend.close)
            backend.start()
            backend.pb = pb_utils
            return backend

        yield make


@pytest.fixture(scope="module")
def shared_backend(checkpoint):
    """One backend for the tests of a module that leave it as it was."""
    pb_utils = FakePbUtils()
    backend = Backend(pb_utils, EngineConfig(model=str(checkpoint)), LABELS, FAKE_ENGINE)
    backend.start()
    backend.pb = pb_utils
    yield backend
    backend.close()


@pytest.fixture
def ask(shared_backend):
    """Send one request and wait for its last response; returns the sender that recorded it."""

    def send(**inputs):
        request = FakeRequest(**inputs)
        shared_backend.execute([request])
        return request.sender.wait()

    return send
