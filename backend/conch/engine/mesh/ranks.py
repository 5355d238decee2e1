"""The other ranks of a mesh: processes of this machine, and those that come from other hosts."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable

from conch.api.config import EngineConfig
from conch.api.mesh import Meeting as AnyMeeting
from conch.api.mesh import Seat
from conch.api.mesh_config import ranks_here
from conch.api.seams import Worker
from conch.engine.mesh.link import Link
from conch.engine.mesh.losses import Losses
from conch.engine.mesh.meeting import Meeting
from conch.engine.mesh.messages import StartRank
from conch.engine.mesh.rendezvous import Rendezvous

_FOUND_WITHIN_S = 1.0
_REAPED_WITHIN_S = 0.5
_LOCALHOST = "127.0.0.1"


class ProcessRanks:
    """Starts ranks as child processes, awaits those of other hosts, and builds the worker of this process.

    Parameters
    ----------
    config
        What the engine was told, with all that depends on the model settled.
    make_worker
        Builds the worker of this process for a seat.
    on_loss
        Called from a thread of its own when a rank is lost that was not told to end, with who and why.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_worker: Callable[[Seat, AnyMeeting], Worker],
        on_loss: Callable[[str], None],
    ) -> None:
        self._config = config
        self._make_worker = make_worker
        self._losses = Losses(on_loss)
        self._rendezvous = Rendezvous.open(config) if config.remote_ranks else None
        self._meeting = Meeting(_LOCALHOST if self._rendezvous is None else self._rendezvous.address)

    def start(self, seat: Seat) -> Link:
        """Start a process, which joins in a second or two; the last ranks come from elsewhere."""
        if self._rendezvous is None or seat.rank < ranks_here(self._config):
            return self._start_here(seat)
        link = Link(seat, self._rendezvous.whence, self._meeting, self._losses, self._rendezvous)
        self._rendezvous.expect(link)
        return link

    def worker(self, seat: Seat) -> Worker:
        """Build the worker of this process."""
        return self._make_worker(seat, self._meeting)

    def find_loss(self) -> str | None:
        """Say which rank is lost and why."""
        return self._losses.find(_FOUND_WITHIN_S)

    def _start_here(self, seat: Seat) -> Link:
        ours, theirs = socket.socketpair()
        with theirs:
            child = Child(theirs)
        whence = f"process {child.pid}"
        link = Link(seat, whence, self._meeting, self._losses, child)
        link.attach(ours, StartRank(self._config, seat, self._meeting.address), whence, child)
        return link


class Child:
    """The process of a rank on this machine: `conch.engine.mesh.link.Body`.

    Parameters
    ----------
    sock
        Its end of a socket pair.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "conch.engine.rank", "--fd", str(sock.fileno())],
            pass_fds=[sock.fileno()],
            stdin=subprocess.DEVNULL,
        )
        self.pid = self._process.pid

    def fate(self, silence: str) -> str:
        """Say how the process has ended; kill one that is silent."""
        try:
            status = self._process.wait(_REAPED_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.end(0.0)
            return silence
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    def end(self, timeout_s: float) -> None:
        """Wait for its end, and kill it after `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
