"""The line to one engine process, and what that process has on its hands."""

from __future__ import annotations

import threading

from conch.api.errors import ErrorCode, RequestError
from conch.api.routing import ReplicaLoad
from conch.engine.protocol import EngineStats, ToEngine
from conch.host.engine_process import STOP_WITHIN_S, EngineProcess


class Burden:
    """How much one engine process has to do: what it told last, and what it was given since.

    Parameters
    ----------
    engine
        Number of the process, never used again.
    seats
        Choices that it runs at once.
    """

    def __init__(self, engine: int, seats: int) -> None:
        self._engine = engine
        self._seats = seats
        self._in_flight = 0
        self._told = EngineStats()
        self._lock = threading.Lock()

    def take(self, choices: int) -> None:
        """Count a request as placed on it."""
        with self._lock:
            self._in_flight += choices

    def release(self, choices: int) -> None:
        """Count a request as ended."""
        with self._lock:
            self._in_flight -= choices

    def hear(self, stats: EngineStats) -> None:
        """Take the engine's own snapshot."""
        self._told = stats

    def load(self) -> ReplicaLoad:
        """Return what a router needs to know: nothing placed is missing, and nothing ended is left."""
        told, in_flight = self._told, self._in_flight
        running = min(in_flight, told.running if told.waiting else self._seats)
        usage = told.kv_blocks_used / told.kv_blocks_total if told.kv_blocks_total else 0.0
        return ReplicaLoad(self._engine, running, in_flight - running, usage)


class Session:
    """The line to one engine process. Any thread may send."""

    def __init__(self, process: EngineProcess, burden: Burden) -> None:
        self._process = process
        self._lock = threading.Lock()
        self.burden = burden

    def send(self, message: ToEngine) -> None:
        """Send one message.

        Raises
        ------
        RequestError
            That engine process is gone.
        """
        try:
            with self._lock:
                self._process.end.send(message)
        except OSError:
            raise unavailable("the engine has just died") from None

    def close(self) -> None:
        """Close the line to a process that has ended."""
        with self._lock:
            self._process.close_end()

    def stop(self) -> None:
        """End the process within a bounded time, even if it does not listen."""
        if self._lock.acquire(timeout=STOP_WITHIN_S):
            try:
                self._process.ask_to_stop()
            finally:
                self._lock.release()
        self._process.stop()


def unavailable(reason: str) -> RequestError:
    """Return the error of a request that may be tried again."""
    return RequestError(f"{reason}; try again later", ErrorCode.UNAVAILABLE)
