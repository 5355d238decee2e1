"""A served model as a context: started as a user would, ended whatever happens."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from loadgen.processes import end_family

START_TIMEOUT_S = 180.0
STOP_GRACE_S = 30.0
LOG_TAIL_LINES = 30


class ServerError(RuntimeError):
    """The server did not start; the message ends with the tail of its log."""


class ServedModel:
    """`conch serve` on three free ports.

    Parameters
    ----------
    command
        The program and its first arguments, such as ``("conch", "serve")``.
    settings
        Keys of `model.json`, passed as ``--set key=value``.
    """

    def __init__(self, command: Sequence[str], settings: Mapping[str, object] | None = None) -> None:
        self._command = list(command)
        self._settings = dict(settings or {})
        self.http_port, self.grpc_port, self.metrics_port = _free_ports(3)

    @property
    def grpc_url(self) -> str:
        """Where gRPC clients connect."""
        return f"localhost:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """Where Prometheus reads."""
        return f"http://localhost:{self.metrics_port}/metrics"

    @property
    def pid(self) -> int:
        """Process id of the program started; server, stub and engine descend from it."""
        return self._process.pid

    @property
    def command_line(self) -> list[str]:
        """The whole command."""
        ports = {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}
        flags = [text for name, port in ports.items() for text in (f"--{name}-port", str(port))]
        pairs = [text for key, value in self._settings.items() for text in ("--set", assignment(key, value))]
        return [*self._command, *flags, *pairs]

    def __enter__(self) -> ServedModel:
        """Start the server and wait until it is ready."""
        self._log = tempfile.NamedTemporaryFile(prefix="conch-serve-", suffix=".log", delete=False)
        began = time.monotonic()
        self._process = subprocess.Popen(
            self.command_line, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            self._wait_until_ready(began + START_TIMEOUT_S)
        except BaseException:
            self._stop()
            raise
        self.start_s = time.monotonic() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the server and everything that it started."""
        self._stop()
        if error is None:
            Path(self._log.name).unlink(missing_ok=True)

    def _wait_until_ready(self, deadline_s: float) -> None:
        url = f"http://localhost:{self.http_port}/v2/health/ready"
        while not _answers(url):
            if self._process.poll() is not None:
                raise ServerError(f"the server ended with {self._process.returncode}\n{self._log_tail()}")
            if time.monotonic() > deadline_s:
                raise ServerError(f"the server was not ready in {START_TIMEOUT_S:.0f} s\n{self._log_tail()}")
            time.sleep(0.1)

    def _stop(self) -> None:
        end_family(self._process.pid, STOP_GRACE_S)
        self._process.wait(timeout=5)
        self._log.close()

    def _log_tail(self) -> str:
        lines = Path(self._log.name).read_text(errors="replace").splitlines()
        return "\n".join([f"command: {' '.join(self.command_line)}", *lines[-LOG_TAIL_LINES:]])


def assignment(key: str, value: object) -> str:
    """Return ``key=value`` as `--set` takes it: strings as they are, all else as JSON."""
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now. They are held together, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for held in sockets:
            held.bind(("localhost", 0))
        return [held.getsockname()[1] for held in sockets]
    finally:
        for held in sockets:
            held.close()
