"""Servers that tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fault_checks import FaultServer
from support.fault_models import write_fault_models
from support.lab import Lab, write_lab_models
from support.server import RunningServer
from support.wire import ServedModel

# The measurement room is a folder of scripts, not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "perf_analyzer"))


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The demo model under its name smollm2, in fp32 so that its output can be compared."""
    log = tmp_path_factory.mktemp("demo") / "server.log"
    with RunningServer(log, settings={"dtype": "float32"}) as server:
        yield server


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Small models under explicit model control; `tiny` is loaded."""
    folder = tmp_path_factory.mktemp("lab")
    write_lab_models(folder / "models")
    flags = ["--model-control-mode=explicit", "--load-model=tiny", "--exit-timeout-secs=3"]
    with RunningServer(folder / "server.log", repository=folder / "models", flags=flags) as server:
        yield Lab(server)


@pytest.fixture(scope="session")
def tiny(lab: Lab) -> ServedModel:
    """The model of `lab` that is always there."""
    return ServedModel(lab.server, "tiny")


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultServer]:
    """One server with all the models of the faults list."""
    folder = tmp_path_factory.mktemp("faults")
    repository, log = folder / "repository", folder / "server.log"
    write_fault_models(repository)
    with RunningServer(log, repository=repository, start_timeout_s=300) as server:
        yield FaultServer(server)


@pytest.fixture
def server_log(tmp_path, request: pytest.FixtureRequest) -> Iterator:
    """Where a test's own server writes; shown when the test fails."""
    path = tmp_path / "server.log"
    yield path
    report = getattr(request.node, "call_report", None)
    if report is not None and report.failed and path.exists():
        print(path.read_text(errors="replace")[-6000:])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.when == "call":
        item.call_report = report
    return report
