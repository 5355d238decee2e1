"""Rank 0's end of the line to another rank."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from typing import Protocol

import msgspec

from conch.api.mesh import MeshError, RankJoined, RankNews, RankOrder, RankReady, Seat
from conch.engine.mesh.line import Line
from conch.engine.mesh.losses import Losses
from conch.engine.mesh.meeting import Meeting, Note
from conch.engine.mesh.messages import Dismissal, FromRank, RankFailed, StartRank

_FOUND_WITHIN_S = 1.0
_encoder = msgspec.msgpack.Encoder()


class Body(Protocol):
    """The process of a rank, as far as rank 0 has power over it."""

    def fate(self, silence: str) -> str:
        """Say what has become of the process, of which the line only tells `silence`, and end it."""

    def end(self, timeout_s: float) -> None:
        """Wait for its end, and force it after `timeout_s`."""


class Link:
    """A rank that has a seat, and a line once it is there: `conch.api.mesh.RankLink`.

    Parameters
    ----------
    seat
        Its seat.
    whence
        Where it comes from, for people to read.
    meeting
        Hears its notes, and when it is lost.
    losses
        Hears when it is lost.
    body
        Its process, or who awaits it.
    """

    def __init__(self, seat: Seat, whence: str, meeting: Meeting, losses: Losses, body: Body) -> None:
        self.seat = seat
        self.whence = whence
        self._meeting, self._losses = meeting, losses
        self._news: queue.SimpleQueue[RankNews | None] = queue.SimpleQueue()
        self._decoder = msgspec.msgpack.Decoder(FromRank)
        self._last_words: str | None = None
        self._line: Line | None = None
        self._body = body
        self._has_ended = False
        self._attaching = threading.Lock()

    def attach(self, sock: socket.socket, start: StartRank, whence: str, body: Body) -> None:
        """Give it the connection to its process, which is told to start.

        Raises
        ------
        OSError
            The process is gone, or has come too late.
        """
        with self._attaching:
            if self._has_ended:
                raise ConnectionError("the mesh is closed")
            self.whence, self._body = whence, body
            self._line = Line(sock, self._hear, self._lose, self.seat.timeout_s)
            self._line.send(_encoder.encode(start))
            self._line.begin()
        self._meeting.join(self._line)

    def send(self, order: RankOrder) -> None:
        """Give an order."""
        if self._line is None:
            raise ConnectionError(f"rank {self.seat.rank} is not there")
        self._line.send(_encoder.encode(order))

    def receive(self, timeout_s: float | None) -> RankNews | None:
        """Return what it says next."""
        try:
            news = self._news.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if news is None:
            self._news.put(None)  # it stays gone
            raise MeshError(
                self._losses.find(_FOUND_WITHIN_S) or f"rank {self.seat.rank} of the mesh is gone"
            )
        return news

    def end(self, timeout_s: float) -> None:
        """Dismiss it."""
        with self._attaching:
            self._has_ended = True
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.send(_encoder.encode(Dismissal()))
            self._line.close(timeout_s)
        self._body.end(timeout_s)

    # -- the line's thread -------------------------------------------------------------------------

    def _hear(self, message: bytes) -> None:
        match news := self._decoder.decode(message):
            case Note():
                assert self._line is not None, "a line hears nothing before it has begun"
                self._meeting.hear(news, self._line)
            case RankFailed():
                self._last_words = news.message
            case RankReady():
                assert self._line is not None, "a line hears nothing before it has begun"
                self._line.expect_promptness()
                self._news.put(news)
            case RankJoined():
                self._news.put(news)

    def _lose(self, reason: str) -> None:
        has_said_why = self._last_words is not None
        became = f"failed: {self._last_words}" if has_said_why else self._body.fate(reason)
        loss = f"rank {self.seat.rank} of the mesh ({self.whence}) {became}"
        self._losses.add(loss, has_said_why)
        self._meeting.lose(loss)
        self._news.put(None)
