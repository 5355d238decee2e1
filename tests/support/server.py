"""A real server for tests: `conch serve` on free ports, and a view of its processes and traces."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

PROTOCOLS = ("http", "grpc", "metrics")
SHARED_MEMORY = Path("/dev/shm")


class RunningServer:
    """A server that is ready on enter and gone on exit.

    Parameters
    ----------
    log_path
        File that takes everything the server writes; shown when it does not start.
    model
        For ``--model``; None serves `repository`, or else the demo model.
    settings
        Keys of model.json, for ``--set``.
    flags
        More arguments for `conch serve`.
    environment
        Added to the environment.
    """

    def __init__(
        self,
        log_path: Path,
        *,
        model: str | None = None,
        repository: Path | None = None,
        settings: Mapping[str, object] | None = None,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        self.log_path = log_path
        self.ports = dict(zip(PROTOCOLS, free_ports(len(PROTOCOLS)), strict=True))
        self.command = [sys.executable, "-m", "conch.cli", "serve"]
        self.command += [f"--{name}-port={port}" for name, port in self.ports.items()]
        self.command += [f"--model={model}"] if model else []
        self.command += [f"--repository={repository}"] if repository else []
        for key, value in (settings or {}).items():
            self.command += ["--set", f"{key}={json.dumps(value)}"]
        self.command += flags
        self._environment = {**os.environ, **(environment or {})}
        self._start_timeout_s = start_timeout_s

    @property
    def http(self) -> str:
        return f"http://localhost:{self.ports['http']}"

    @property
    def grpc(self) -> str:
        return f"localhost:{self.ports['grpc']}"

    @property
    def metrics(self) -> str:
        return f"http://localhost:{self.ports['metrics']}/metrics"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def __enter__(self) -> RunningServer:
        self.launch()
        try:
            wait_until(
                lambda: self.is_ready() or self.process.poll() is not None,
                self._start_timeout_s,
                "ready server",
            )
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}"
        except AssertionError as error:
            self.stop()
            raise AssertionError(f"{error}\n{' '.join(self.command)}\n{self.log[-4000:]}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def launch(self) -> None:
        """Start without waiting."""
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environment,
            )

    def stop(self, timeout_s: float = 30.0) -> int:
        """Stop as an operator would, and by force if that fails; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def end(self, timeout_s: float = 30.0) -> None:
        """Stop in haste: a server that is told again and again waits for nothing."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.2)

    def is_ready(self) -> bool:
        """Whether the server says that it and all its models are."""
        return self._status("/v2/health/ready") == 200

    def is_model_ready(self, model: str) -> bool:
        return self._status(f"/v2/models/{model}/ready") == 200

    def tritonserver(self) -> psutil.Process:
        (found,) = [p for p in psutil.Process(self.process.pid).children() if p.name() == "tritonserver"]
        return found

    def stubs(self) -> list[psutil.Process]:
        """One for each model instance."""
        return self.tritonserver().children()

    def engines(self) -> list[psutil.Process]:
        """One for each stub of a conch model."""
        return [engine for stub in self.stubs() for engine in stub.children()]

    def family(self) -> list[psutil.Process]:
        """The supervisor and all that descends from it."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def shared_memory(self) -> list[Path]:
        """Regions of this server; its supervisor's pid is in their names."""
        return list(SHARED_MEMORY.glob(f"conch_{self.process.pid}_*"))

    def _status(self, path: str) -> int | None:
        try:
            with urllib.request.urlopen(self.http + path, timeout=2) as answer:
                return int(answer.status)
        except urllib.request.HTTPError as error:
            return error.code
        except OSError:
            return None


def free_ports(count: int) -> list[int]:
    """Return ports that are free now, all different."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """Wait for a condition; return the seconds it took, or fail."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"no {what} within {timeout_s:g} s"
        time.sleep(0.05)
    return time.monotonic() - began


def are_gone(processes: Sequence[psutil.Process]) -> bool:
    """Whether none of these runs any more; one that only waits to be reaped is gone."""
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def assert_nothing_left(server: RunningServer, family: list[psutil.Process], timeout_s: float) -> None:
    """Wait until a server has gone with its processes and shared memory, and left its ports free."""
    wait_until(lambda: are_gone(family), timeout_s, "end of all processes")
    wait_until(lambda: not server.shared_memory(), 2, "clean shared memory")
    for port in server.ports.values():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
