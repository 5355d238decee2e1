"""The engine as a process of its own: messages in, one message out for each step."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
import traceback
from typing import NoReturn

from conch.engine.build import BuiltEngine, build_engine
from conch.engine.core import Engine
from conch.engine.protocol import (
    AddRequest,
    CancelRequest,
    EngineEnd,
    EngineFailed,
    Progress,
    StartEngine,
    StepNews,
    StopEngine,
    ToEngine,
)

STATS_PERIOD_S = 0.05


def serve(end: EngineEnd) -> int:
    """Run an engine for the host at the other end, until it says stop or is gone; return the exit status."""
    try:
        start = end.receive()
        if not isinstance(start, StartEngine):
            raise TypeError(f"the first message must be StartEngine, not {type(start).__name__}")
        built = build_engine(
            start.config,
            lambda stage, fraction: end.send(Progress(stage, fraction)),
            lambda reason: _give_up(end, reason),
        )
        _set_aside_what_stays()
        end.send(built.info)
        _Loop(end, built).run()
    except (EOFError, ConnectionError):
        pass  # the host is gone, and so is everyone who waits for an answer
    except Exception as error:
        traceback.print_exc()
        end.send(EngineFailed(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _give_up(end: EngineEnd, reason: str) -> NoReturn:
    """End at once, for a rank is lost: the loop may be waiting for it, where nothing can wake it."""
    with contextlib.suppress(OSError):
        end.send(EngineFailed(f"MeshError: {reason}"))
    _end_process(1)


def _set_aside_what_stays() -> None:
    """Keep the collector from the model and its plugins, as it is kept from what is imported."""
    gc.collect()
    gc.freeze()


class _Loop:
    """Steps while there is work, sleeps in the kernel while there is none."""

    def __init__(self, end: EngineEnd, built: BuiltEngine) -> None:
        self._end = end
        self._engine: Engine = built.engine
        self._stats_due_s = 0.0
        self._stopping = False

    def run(self) -> None:
        """Serve until told to stop."""
        self._send_news()
        while not self._stopping:
            while self._end.has_message(0.0 if self._engine.has_work else None):
                self._handle(self._end.receive())
                if self._stopping:
                    break
            self._send_news()
        self._engine.close()

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                self._engine.add(message)
            case CancelRequest():
                self._engine.cancel(message)
            case StopEngine():
                self._stopping = True
            case StartEngine():
                raise TypeError("the engine has been started already")

    def _send_news(self) -> None:
        """Take one step and tell the host; the last step before idling always carries the stats."""
        outputs = tuple(self._engine.step())
        now = time.monotonic()
        wants_stats = now >= self._stats_due_s or not self._engine.has_work
        if wants_stats:
            self._stats_due_s = now + STATS_PERIOD_S
        if outputs or wants_stats:
            self._end.send(StepNews(outputs, self._engine.stats() if wants_stats else None))


def main(fd: int) -> None:
    """Serve on an inherited socket, and end the process."""
    from multiprocessing.connection import Connection

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the host decides
    _end_process(serve(EngineEnd(Connection(fd))))


def _end_process(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # taking an interpreter with torch down in order costs a second, in which the host waits
