"""One engine process: its start, its end of the socket, and its bounded end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import conch
from conch.engine.protocol import HostEnd, StopEngine

STOP_WITHIN_S = 5.0
_REAP_WITHIN_S = 2.0


def engine_command() -> tuple[str, ...]:
    """Return how to start an engine with this interpreter, which inside Triton's stub has no program."""
    beside_prefix = Path(sys.prefix, "bin", "python")
    python = str(beside_prefix) if beside_prefix.exists() else sys.executable
    return (python, "-m", "conch.engine")


class EngineProcess:
    """A running engine process. It dies with the thread that started it.

    Parameters
    ----------
    command
        What to run; ``--fd N`` is appended.
    environment
        Variables that it gets besides ours.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                [*command, "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else 2,
                env={**_environment(), **environment},
            )
        self.end = HostEnd(Connection(ours.detach()))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def reap(self) -> str:
        """Wait briefly for its end, then force it; returns how it ended, for people to read."""
        try:
            code = self._child.wait(_REAP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            code = self._child.wait()
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"

    def close_end(self) -> None:
        """Close our end of the socket."""
        with contextlib.suppress(OSError):
            self.end.close()

    def ask_to_stop(self) -> None:
        """Send StopEngine; what cannot be sent to is about to end anyway."""
        with contextlib.suppress(OSError):
            self.end.send(StopEngine())

    def stop(self) -> None:
        """Give it `STOP_WITHIN_S` to end, then kill it."""
        try:
            self._child.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._child.kill()


def _has_descriptor(stream: object) -> bool:
    try:
        return stream.fileno() >= 0  # type: ignore[attr-defined, no-any-return]
    except (AttributeError, OSError, ValueError):
        return False


def _environment() -> dict[str, str]:
    """Let the child find conch where only the backend folder holds it."""
    home = str(Path(conch.__file__).resolve().parents[1])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, home])}
