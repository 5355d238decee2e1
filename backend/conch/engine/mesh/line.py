"""A socket between rank 0 and another rank: whole messages, and signs of life both ways."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

_BEAT_S = 1.0
_BEATS = 5
"""At least so many are missed before a peer is given up."""
_PROMPT_S = 10.0
_LENGTH = struct.Struct("!I")
_BEAT = b""


def send_message(sock: socket.socket, message: bytes) -> None:
    """Send one message whole."""
    sock.sendall(_LENGTH.pack(len(message)) + message)


def receive_message(sock: socket.socket, most_bytes: int | None = None) -> bytes:
    """Return the next message.

    Raises
    ------
    EOFError
        The peer has hung up.
    OSError
        The connection is broken, the socket's timeout has passed, or the message is longer than `most_bytes`.
    """
    (length,) = _LENGTH.unpack(_receive(sock, _LENGTH.size))
    if most_bytes is not None and length > most_bytes:
        raise ConnectionError(f"a message of {length} bytes where at most {most_bytes} are expected")
    return _receive(sock, length)


def _receive(sock: socket.socket, count: int) -> bytes:
    received = bytearray(count)
    view = memoryview(received)
    while view:
        done = sock.recv_into(view)
        if not done:
            raise EOFError
        view = view[done:]
    return bytes(received)


def promptness(timeout_s: float) -> float:
    """Return how long a rank that serves may be silent, where others wait for it up to `timeout_s`."""
    return min(_PROMPT_S, timeout_s / 2)


class Line:
    """One end of a connection. A thread listens, and lets the peer know again and again that it is alive.

    Silence is counted in beats that this end has sent since it heard the peer last, not in time: a process
    that was stopped and goes on does not take its own absence for the peer's.

    Parameters
    ----------
    sock
        Connected; belongs to the line from now on.
    hear
        Called in the thread with each message.
    lose
        Called in the thread, once, with what the peer has done: not when this end has closed the line.
    timeout_s
        How long the peer may be silent at first.
    """

    def __init__(
        self,
        sock: socket.socket,
        hear: Callable[[bytes], None],
        lose: Callable[[str], None],
        timeout_s: float,
    ) -> None:
        self._socket = sock
        self._hear, self._lose = hear, lose
        self._patience_s = timeout_s
        self._prompt_s = promptness(timeout_s)
        self._beat_s = min(_BEAT_S, self._prompt_s / _BEATS)
        self._is_closing = False
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="conch-rank-line", daemon=True)

    def begin(self) -> None:
        """Listen from now on."""
        self._socket.settimeout(self._patience_s)
        self._thread.start()

    def expect_promptness(self) -> None:
        """Have less patience: the peer has loaded, and nothing holds it up for long any more."""
        self._patience_s = self._prompt_s
        self._socket.settimeout(self._patience_s)

    def send(self, message: bytes) -> None:
        """Send a message. Raises OSError when the peer is gone or takes nothing."""
        with self._sending:
            send_message(self._socket, message)

    def close(self, timeout_s: float) -> None:
        """Hang up, and wait for the peer to do so: what it was told last reaches it. Safe to repeat."""
        self._is_closing = True
        self._shut(socket.SHUT_WR)
        self._thread.join(timeout_s)
        self._shut(socket.SHUT_RDWR)

    def _shut(self, how: int) -> None:
        with contextlib.suppress(OSError):  # the peer may have been first
            self._socket.shutdown(how)

    def _run(self) -> None:
        reason = self._listen()
        self._socket.close()
        if not self._is_closing:
            self._lose(reason)

    def _listen(self) -> str:
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        unanswered, due_s = 0, time.monotonic()
        try:
            while unanswered <= math.ceil(self._patience_s / self._beat_s):
                if readable.poll(1000 * max(0.0, due_s - time.monotonic())):
                    message = receive_message(self._socket)
                    unanswered = 0
                    if message != _BEAT:
                        self._hear(message)
                if time.monotonic() >= due_s:
                    self._beat()
                    unanswered += 1
                    due_s = time.monotonic() + self._beat_s
        except TimeoutError:
            pass
        except (EOFError, OSError):
            return "has hung up"
        except Exception as error:  # a message that cannot be read: nothing it says can be trusted
            return f"sent what cannot be understood: {type(error).__name__}: {error}"
        return f"has shown no sign of life for {self._patience_s:g} s"

    def _beat(self) -> None:
        if self._sending.acquire(blocking=False):  # who sends meanwhile shows life enough
            try:
                send_message(self._socket, _BEAT)
            finally:
                self._sending.release()
