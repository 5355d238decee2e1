"""The other ranks of a mesh, as processes of this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from conch.api.config import EngineConfig
from conch.api.mesh import RankNews, RankOrder, Seat
from conch.api.seams import Worker


class StartRank(msgspec.Struct, frozen=True, tag="start"):
    """The first message to a rank: what it is."""

    config: EngineConfig
    seat: Seat


class ProcessRanks:
    """Starts ranks as child processes, and builds the worker of this one.

    Parameters
    ----------
    config
        What the engine was told, with all that depends on the model settled.
    make_worker
        Builds the worker of this process for a seat.
    """

    def __init__(self, config: EngineConfig, make_worker: Callable[[Seat], Worker]) -> None:
        self._config = config
        self._make_worker = make_worker

    def start(self, seat: Seat) -> RankProcess:
        """Start a process; it joins in a second or two."""
        return RankProcess(StartRank(self._config, seat))

    def worker(self, seat: Seat) -> Worker:
        """Build the worker of this process."""
        return self._make_worker(seat)


class RankProcess:
    """A child process with a socket: `conch.api.mesh.RankLink`."""

    def __init__(self, start: StartRank) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "conch.engine.rank", "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(RankNews)
        self._connection.send_bytes(self._encoder.encode(start))

    def send(self, order: RankOrder) -> None:
        """Give an order."""
        self._connection.send_bytes(self._encoder.encode(order))

    def receive(self, timeout_s: float | None) -> RankNews | None:
        """Return what it says next; None where the time has passed."""
        if not self._connection.poll(timeout_s):
            return None
        news: RankNews = self._decoder.decode(self._connection.recv_bytes())
        return news

    def end(self, timeout_s: float) -> str:
        """Hang up, which ends the process; kill it where it does not."""
        self._connection.close()
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        return f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
