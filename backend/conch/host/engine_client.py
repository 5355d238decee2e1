"""Owns the engine process: starts it, listens to it, and starts it again when it dies."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from conch.api.errors import ConchError, ErrorCode, RequestError
from conch.engine.protocol import (
    EngineFailed,
    EngineReady,
    Progress,
    StartEngine,
    StepNews,
)
from conch.host.engine_process import STOP_WITHIN_S, EngineProcess
from conch.host.session import Burden, Session, unavailable
from conch.host.shares import EngineShare

GIVEN_UP_AFTER = 3
BACK_WITHIN_S = 9.0
_CLOSE_MARGIN_S = 3.0


class EngineEvents(Protocol):
    """Who hears of the engine. Called from the client's thread; must not block."""

    def news(self, news: StepNews) -> None:
        """Take what one step brought."""

    def engine_up(self, session: Session) -> None:
        """Note that the engine serves, for the first time or again."""

    def engine_down(self, session: Session, error: RequestError) -> None:
        """Note that the engine that served is gone; its requests are lost."""

    def engine_given_up(self, reason: str) -> None:
        """Note that the engine failed to start several times in a row, or takes long; it is still tried."""


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds between starts: doubled with each start that fails."""

    first_s: float = 0.1
    longest_s: float = 30.0


class EngineClient:
    """Keeps one engine running.

    One thread starts the process, receives from it, and lives until it is gone: the process dies with the
    thread that started it.

    Parameters
    ----------
    share
        What the engine is given.
    events
        Who hears of it.
    command
        How to start it.
    numbers
        Where the number of each engine process comes from.
    name
        What messages for people call it.
    """

    def __init__(
        self,
        share: EngineShare,
        events: EngineEvents,
        command: Sequence[str],
        numbers: Iterator[int],
        name: str = "the engine",
    ) -> None:
        self._share = share
        self._events = events
        self._command = tuple(command)
        self._numbers = numbers
        self._name = name
        self._pauses = Pauses()
        self._session: Session | None = None
        self._starting: Session | None = None
        self._closing = threading.Event()
        self._told_progress = ("", 0)
        self._patience: threading.Timer | None = None
        self._began_s = self._first_start_s = 0.0
        self._first: Future[EngineReady] = Future()
        self._thread = threading.Thread(target=self._supervise, name="conch-engine-client", daemon=True)

    def start(self) -> None:
        """Start the engine; `wait` tells what became of it."""
        self._began_s = time.monotonic()
        self._thread.start()

    def wait(self) -> EngineReady:
        """Wait until the engine serves for the first time.

        Raises
        ------
        ConchError
            It could not start; the message is its own.
        """
        return self._first.result()

    @property
    def session(self) -> Session | None:
        """The line to the engine that serves, None while it is being started again."""
        return self._session

    def close(self) -> None:
        """Stop the engine; returns within about `STOP_WITHIN_S`."""
        self._closing.set()
        self._stop_waiting()
        session = self._starting
        self._session = None
        if session is not None:
            session.stop()
        if self._thread.is_alive():
            self._thread.join(STOP_WITHIN_S + _CLOSE_MARGIN_S)

    # -- the thread ---------------------------------------------------------------------------------

    def _supervise(self) -> None:
        failures = 0
        pause_s = self._pauses.first_s
        while not self._closing.is_set():
            served, reason = self._run_once()
            if self._closing.is_set():
                break
            if not self._first.done():
                self._first.set_exception(ConchError(f"{self._name} {reason}"))
                return
            failures = 0 if served else failures + 1
            pause_s = self._pauses.first_s if served else min(2 * pause_s, self._pauses.longest_s)
            if failures == GIVEN_UP_AFTER:
                self._events.engine_given_up(reason)
            _say(f"{self._name} {reason}; starting it again in {pause_s:g} s")
            self._closing.wait(pause_s)
        if not self._first.done():
            self._first.set_exception(ConchError("closed while the engine was starting"))

    def _run_once(self) -> tuple[bool, str]:
        """Run one engine process to its end; returns whether it served, and why it ended."""
        try:
            process = EngineProcess(self._command, self._share.environment)
        except OSError as error:
            return False, f"could not be started: {error}"
        burden = Burden(next(self._numbers), self._share.config.max_num_seqs)
        session = self._starting = Session(process, burden)
        served = False
        reason = ""
        try:
            session.send(StartEngine(self._share.config))
            if self._closing.is_set():
                process.ask_to_stop()  # close() may have come before there was a session to stop
            while not reason:
                match message := process.end.receive():
                    case StepNews():
                        self._events.news(message)
                    case EngineReady():
                        served = True
                        self._stop_waiting()
                        self._session = session
                        self._events.engine_up(session)
                        if not self._first.done():
                            self._first_start_s = time.monotonic() - self._began_s
                            self._first.set_result(message)
                    case EngineFailed():
                        reason = f"failed: {message.message}"
                    case Progress():
                        self._tell_progress(message)
        except (EOFError, OSError, RequestError):
            pass
        except Exception as error:  # a message that cannot be read: nothing it says can be trusted
            reason = f"sent what cannot be understood: {error}"
        finally:
            self._session = None
            ended = process.reap()
            session.close()
            self._starting = None
        if served:
            self._wait_for_return()
            self._events.engine_down(session, self._why_down(reason or ended))
        return served, reason or ended

    def _tell_progress(self, progress: Progress) -> None:
        """Log a stage's beginning, its end, and each quarter between."""
        told = (progress.stage, int(progress.fraction * 4))
        if told != self._told_progress:
            self._told_progress = told
            _say(f"{progress.stage} {progress.fraction:.0%}")

    def _wait_for_return(self) -> None:
        """Give the engine up when it is not back in time: by then readiness must tell the truth."""
        if self._closing.is_set():
            return
        patience_s = max(BACK_WITHIN_S, 2 * self._first_start_s)
        reason = f"has not come back within {patience_s:.0f} s"
        self._patience = threading.Timer(patience_s, self._events.engine_given_up, [reason])
        self._patience.daemon = True
        self._patience.start()

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _why_down(self, reason: str) -> RequestError:
        if self._closing.is_set():
            return unavailable("the model is stopping")
        return RequestError(f"the engine {reason}", ErrorCode.INTERNAL)


def _say(text: str) -> None:
    print(f"conch: {text}", file=sys.stderr, flush=True)
