"""Keeps one tritonserver running, and ends it whole.

Triton 2.51 never restarts the stub of a decoupled model: its calls hang for ever while health stays good,
and unloading the model does not end them. So when a stub dies the server is restarted as a whole, which gives
every waiting client its error at once and makes readiness true to the facts meanwhile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from conch.host.serving.command import LAST_WORDS_S, ServerCommand
from conch.host.serving.errors import ServeError
from conch.host.serving.health import HealthClient, ModelState
from conch.host.serving.process import ServerProcess
from conch.host.serving.signals import SignalWatch

_STARTING_TICK_S = 0.1
_SERVING_TICK_S = 0.5
_REAPED_WITHIN_S = 0.4
_KILL_MARGIN_S = 1.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_STEADY_AFTER_S = 60.0
_MAX_FAILED_STARTS = 5


class Ending(Enum):
    """How one run of the server ended."""

    STOPPED = "stopped"
    BROKEN = "broken"
    FAILED_TO_START = "failed to start"


@dataclass(frozen=True)
class RunReport:
    """How one run of the server ended, and why, for people to read."""

    ending: Ending
    reason: str


_STOPPED = RunReport(Ending.STOPPED, "told to stop")


class Supervisor:
    """Starts a server, restarts it when it or a stub of it dies, and stops it when told to.

    Parameters
    ----------
    command
        What to run.
    announce
        Called each time that the server has become ready, with its models and the seconds it took.
    """

    def __init__(self, command: ServerCommand, announce: Callable[[list[ModelState], float], None]) -> None:
        self._command = command
        self._announce = announce

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or SIGHUP; a second one does not wait for requests in flight.

        Raises
        ------
        ServeError
            The server did not become ready: at the first start at once, later after several tries.
        """
        failed_starts = 0
        has_served = False
        pause_s = _FIRST_PAUSE_S
        with SignalWatch() as signals:
            while True:
                self._command.endpoints.refuse_taken_ports()
                process = ServerProcess(self._command)
                try:
                    report = self._oversee(process, signals)
                finally:
                    process.destroy()
                if report.ending is Ending.STOPPED:
                    return
                has_served = has_served or report.ending is Ending.BROKEN
                failed_starts = failed_starts + 1 if report.ending is Ending.FAILED_TO_START else 0
                if not has_served or failed_starts == _MAX_FAILED_STARTS:
                    raise ServeError(f"the server did not become ready: {report.reason}")
                if process.age_s > _STEADY_AFTER_S:
                    pause_s = _FIRST_PAUSE_S
                _say(f"{report.reason}; starting again in {pause_s:g} s")
                if signals.wait(pause_s):
                    return
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _oversee(self, process: ServerProcess, signals: SignalWatch) -> RunReport:
        report = self._await_ready(process, signals) or self._await_trouble(process, signals)
        if report.ending is Ending.STOPPED:
            self._stop(process, signals)
        return report

    def _await_ready(self, process: ServerProcess, signals: SignalWatch) -> RunReport | None:
        """Return None once the server is ready."""
        endpoints = self._command.endpoints
        if endpoints.port["http"] is None:
            _say("HTTP is switched off, so readiness cannot be told from here")
            return None
        health = HealthClient(endpoints.reachable("http"))
        while not health.is_live():
            if signals.wait(_STARTING_TICK_S):
                return _STOPPED
            if process.exit_code is not None:
                reason = f"tritonserver {_describe_exit(process.exit_code)}; it said why above"
                return RunReport(Ending.FAILED_TO_START, reason)
        process.note_environment()
        models = health.models()
        failed = [f"model {model.name} did not load: {model.reason}" for model in models if model.has_failed]
        if failed and not self._command.tolerates_failed_models:
            return RunReport(Ending.FAILED_TO_START, "\n".join(failed))
        self._announce(models, process.age_s)
        return None

    def _await_trouble(self, process: ServerProcess, signals: SignalWatch) -> RunReport:
        seen_at: dict[int, float] = {}
        while not signals.wait(_SERVING_TICK_S):
            if process.exit_code is not None:
                return RunReport(Ending.BROKEN, f"tritonserver {_describe_exit(process.exit_code)}")
            now = time.monotonic()
            seen_at = {pid: seen_at.get(pid, now) for pid in process.dead_stubs()}
            lost = [str(pid) for pid, since in seen_at.items() if now - since > _REAPED_WITHIN_S]
            if lost:
                return RunReport(Ending.BROKEN, f"the process of a model died (stub {', '.join(lost)})")
        return _STOPPED

    def _stop(self, process: ServerProcess, signals: SignalWatch) -> None:
        _say(f"stopping; requests in flight have {self._command.exit_timeout_s} s")
        process.request_stop()
        patience = (
            (self._command.exit_timeout_s, process.end_requests),
            (LAST_WORDS_S + _KILL_MARGIN_S, lambda: _say("not waiting any longer")),
        )
        for seconds, give_up in patience:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                if process.exit_code is not None or signals.wait(_STARTING_TICK_S):
                    return
            give_up()


def _describe_exit(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


def _say(text: str) -> None:
    print(f"conch: {text}", file=sys.stderr, flush=True)
