"""Notes that all ranks can read: how they find one another, without a file or a port for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import msgspec

from conch.api.mesh import MeshError
from conch.engine.mesh.line import Line


class Note(msgspec.Struct, frozen=True, array_like=True, tag="note"):
    """A value under a name that is used once."""

    key: str
    value: bytes


class Meeting:
    """One process's copy of all notes; those of others come over its lines, and rank 0 passes them on.

    Parameters
    ----------
    address
        Of this host, where the other ranks reach it.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._notes: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._lines: list[Line] = []
        self._loss: str | None = None

    def join(self, line: Line) -> None:
        """Tell another process all that has been said, and all that will be."""
        with self._changed:
            self._lines.append(line)
            told = [Note(key, value) for key, value in self._notes.items()]
        for note in told:
            _tell(line, note)

    def post(self, key: str, value: bytes) -> None:
        """Tell all ranks a value under a name that is used once."""
        self._spread(Note(key, value), lambda line: True)

    def hear(self, note: Note, source: Line) -> None:
        """Take a note of another process."""
        self._spread(note, lambda line: line is not source)

    def read(self, key: str, timeout_s: float) -> bytes:
        """Return what some rank says under a name, waiting for it.

        Raises
        ------
        MeshError
            Nobody has said it in time, or a rank is gone, which may have been the one to say it.
        """
        with self._changed:
            self._changed.wait_for(lambda: key in self._notes or self._loss is not None, timeout_s)
            if key in self._notes:
                return self._notes[key]
            if self._loss is not None:
                raise MeshError(f"nobody tells {key!r} any more: {self._loss}")
            raise MeshError(f"nobody has told {key!r} within distributed_timeout_seconds ({timeout_s:g})")

    def lose(self, loss: str) -> None:
        """Let nobody wait for notes any more, of which some may never come."""
        with self._changed:
            self._loss = loss
            self._changed.notify_all()

    def _spread(self, note: Note, is_listener: Callable[[Line], bool]) -> None:
        with self._changed:
            self._notes[note.key] = note.value
            self._changed.notify_all()
            listeners = [line for line in self._lines if is_listener(line)]
        for line in listeners:
            _tell(line, note)


def _tell(line: Line, note: Note) -> None:
    with contextlib.suppress(OSError):  # a rank that is gone is told of by its line
        line.send(msgspec.msgpack.encode(note))
