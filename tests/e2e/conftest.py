"""Servers that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.server import RunningServer


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The demo model under its name smollm2, in fp32 so that its output can be compared."""
    log = tmp_path_factory.mktemp("demo") / "server.log"
    with RunningServer(log, settings={"dtype": "float32"}) as server:
        yield server


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
