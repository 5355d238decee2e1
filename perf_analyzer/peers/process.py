"""Programs of `programs/` in processes of their own: started, asked, held still while others are measured."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from loadgen.processes import end_family, family

LOG_TAIL_LINES = 25
_ROOM = Path(__file__).resolve().parents[1]
PROGRAMS = Path(__file__).resolve().parent / "programs"
_SHARED = _ROOM / "in_process"


class ProgramError(RuntimeError):
    """A program ended or was too slow; the message ends with what it printed."""


class Program:
    """A program that answers one line of JSON with one line of JSON; a context manager.

    Between questions it is stopped with all its children, so that it computes only when asked.

    Parameters
    ----------
    python
        The interpreter, which decides on the packages.
    name
        File under `programs/`.
    options
        Sent as its only argument, JSON.
    environment
        Variables on top of this process's own.
    """

    def __init__(
        self,
        python: Path,
        name: str,
        options: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        self._command = [str(python), str(PROGRAMS / name), json.dumps(dict(options))]
        self._environment = {**os.environ, "PYTHONPATH": str(_SHARED), **(environment or {})}
        self._environment["PATH"] = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self._start_timeout_s = start_timeout_s
        self.peak_bytes = 0

    def __enter__(self) -> Program:
        """Start it and wait until it is ready."""
        self._log = tempfile.TemporaryFile("w+")
        self.began_s = time.perf_counter()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=self._environment,
            start_new_session=True,
        )
        try:
            self.ready = self._answer(self._start_timeout_s)
            self._settle()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it with its children."""
        self._end()

    def ask(self, question: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a question and return the answer.

        Raises
        ------
        ProgramError
            No answer within `timeout_s`, or the program failed.
        """
        assert self._process.stdin is not None
        _signal_family(self._process.pid, signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ProgramError(self._why_silent(timeout_s)) from error
        answer = self._answer(timeout_s)
        self._settle()
        return answer

    def _settle(self) -> None:
        self.peak_bytes = max(self.peak_bytes, peak_rss_bytes(self._process.pid))
        _signal_family(self._process.pid, signal.SIGSTOP)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        alarm = threading.Timer(timeout_s, end_family, (self._process.pid, 0.0))
        alarm.start()
        try:
            line = self._process.stdout.readline()
        finally:
            alarm.cancel()
        if not line:
            raise ProgramError(self._why_silent(timeout_s))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _why_silent(self, timeout_s: float) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._log.seek(0)
        tail = "".join(self._log.readlines()[-LOG_TAIL_LINES:])
        name = Path(self._command[1]).name
        return f"{name} gave no answer; status {self._process.poll()}, limit {timeout_s:.0f} s\n{tail}"

    def _end(self) -> None:
        _signal_family(self._process.pid, signal.SIGCONT)
        end_family(self._process.pid, grace_s=1)
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.wait(timeout=10)


def peak_rss_bytes(pid: int) -> int:
    """Return the largest resident sizes that a process and its living children have had, summed."""
    total = 0
    try:
        members = family(pid)
    except psutil.NoSuchProcess:
        return 0
    for member in members:
        with contextlib.suppress(OSError):
            total += read_peak(Path(f"/proc/{member.pid}/status").read_text())
    return total


def read_peak(status: str) -> int:
    """Return VmHWM, in bytes, of the text of a /proc/PID/status; 0 where it has none, as a zombie."""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _signal_family(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for member in family(pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(number)


def run_to_end(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> None:
    """Run a command that prints much and matters only if it fails; it ends with its children.

    Raises
    ------
    ProgramError
        It failed or was too slow.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, env=environment
        )
        status: int | None = None
        try:
            status = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end_family(process.pid, grace_s=5)
        if status != 0:
            log.seek(0)
            tail = "".join(log.readlines()[-LOG_TAIL_LINES:])
            how = "was too slow" if status is None else f"ended with {status}"
            raise ProgramError(f"{' '.join(command[:6])} {how} (limit {timeout_s:.0f} s)\n{tail}")
