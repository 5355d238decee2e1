"""A helper program that answers one line of JSON with one line of JSON.

The engine runs in such a program and not in the benchmark's own process, so that its threads, its memory and
its imports are what they are for a user, and so that a second engine can be measured in the same run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from loadgen.processes import end_family

LOG_TAIL_LINES = 30
PROGRAMS = Path(__file__).resolve().parents[1] / "in_process"


class WorkerError(RuntimeError):
    """The program ended or was too slow; the message ends with what it printed."""


class Worker:
    """One program of `in_process/`; the first line that it prints says what it is ready to serve.

    Parameters
    ----------
    program
        File name under `in_process/`.
    options
        Sent as its only argument, JSON.
    """

    def __init__(self, program: str, options: dict[str, Any], start_timeout_s: float = 180.0) -> None:
        self._command = [sys.executable, str(PROGRAMS / program), json.dumps(options)]
        self._start_timeout_s = start_timeout_s

    def __enter__(self) -> Worker:
        """Start it and wait until it is ready."""
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},  # as the served engine has it
        )
        try:
            self.ready = self._answer(self._start_timeout_s)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self._stop()

    def ask(self, question: dict[str, Any], timeout_s: float = 600.0) -> dict[str, Any]:
        """Send a question and return the answer.

        Raises
        ------
        WorkerError
            No answer within `timeout_s`, or the program failed.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        alarm = threading.Timer(timeout_s, self._process.kill)
        alarm.start()
        try:
            line = self._process.stdout.readline()
        finally:
            alarm.cancel()
        if not line:
            raise WorkerError(self._why_silent(timeout_s))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _why_silent(self, timeout_s: float) -> str:
        status = self._process.wait(timeout=5)
        self._log.seek(0)
        tail = "".join(self._log.readlines()[-LOG_TAIL_LINES:])
        name = Path(self._command[1]).name
        return f"{name} gave no answer and ended with {status} (limit {timeout_s:.0f} s)\n{tail}"

    def _stop(self) -> None:
        end_family(self._process.pid, grace_s=10)
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                pipe.close()
        self._process.wait(timeout=5)
