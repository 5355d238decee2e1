"""``python -m conch.engine.rank``: one rank of a mesh, which takes orders from rank 0.

With ``--fd N`` on an inherited socket; with ``--host`` and ``--port`` from an engine of another host, as
``conch rank`` starts it.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import socket
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

import msgspec

from conch.api.errors import ConchError
from conch.api.mesh import RankJoined, RankNews, RankOrder, RankReady
from conch.engine.environment import die_with_parent, import_what_is_needed, settle_environment
from conch.engine.mesh.joining import Application, JoinError, NoEngineError
from conch.engine.mesh.line import Line, receive_message
from conch.engine.mesh.meeting import Meeting, Note
from conch.engine.mesh.messages import Dismissal, RankFailed, StartRank, ToRank
from conch.engine.mesh.secret import read_secret

if TYPE_CHECKING:
    from conch.worker import FollowingWorker

ENDED, FAILED, REFUSED = 0, 1, 2
"""Exit status: the engine has ended as it was told to; something has failed; another try is of no use."""


class RankEnd:
    """A rank's end of its line. The process ends at once when rank 0 is gone, whatever it waits for.

    Parameters
    ----------
    sock
        The connection.
    start
        The first message on it.
    """

    def __init__(self, sock: socket.socket, start: StartRank) -> None:
        self.start = start
        self.meeting = Meeting(start.address or sock.getsockname()[0])
        self._orders: queue.SimpleQueue[RankOrder | None] = queue.SimpleQueue()
        self._decoder = msgspec.msgpack.Decoder(ToRank)
        self._encoder = msgspec.msgpack.Encoder()
        self._is_dismissed = False
        self._has_orders = False
        self._line = Line(sock, self._hear, self._lose, start.seat.timeout_s)
        self.meeting.join(self._line)
        self._line.begin()

    def receive(self) -> RankOrder | None:
        """Return the next order, None when there will be none."""
        return self._orders.get()

    def send(self, news: RankNews | RankFailed) -> None:
        """Tell rank 0."""
        self._line.send(self._encoder.encode(news))

    def _hear(self, message: bytes) -> None:
        match told := self._decoder.decode(message):
            case Note():
                self.meeting.hear(told, self._line)
            case RankOrder():
                if not self._has_orders:
                    self._has_orders = True
                    self._line.expect_promptness()
                self._orders.put(told)
            case Dismissal():
                self._is_dismissed = True
                self._orders.put(None)

    def _lose(self, reason: str) -> None:
        if not self._is_dismissed:
            say(f"rank {self.start.seat.rank}: the engine {reason}")
        end_process(ENDED if self._is_dismissed else FAILED)


def serve(end: RankEnd) -> int:
    """Take orders until rank 0 dismisses this rank; return the exit status."""
    try:
        worker = _join(end)
        end.send(RankReady.of_sizes(worker.num_blocks, worker.num_slots))
        while order := end.receive():
            worker.execute(order)
        return ENDED
    except Exception as error:
        return _report(end, error)


def _join(end: RankEnd) -> FollowingWorker:
    import_what_is_needed()
    from conch.engine.build import build_follower

    end.send(RankJoined())
    return build_follower(end.start.config, end.start.seat, end.meeting)


def _report(end: RankEnd, error: Exception) -> int:
    """Tell why this rank ends, to rank 0 if it is still there: else it is why."""
    try:
        end.send(RankFailed(f"{type(error).__name__}: {error}"))
    except OSError:
        return FAILED
    traceback.print_exc()
    return FAILED


def end_process(status: int) -> NoReturn:
    """End at once: whoever waits for this rank sees its sockets close."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def say(text: str) -> None:
    """Tell people."""
    print(f"conch: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m conch.engine.rank", description=__doc__)
    parser.add_argument("--fd", type=int, help="inherited end of a socket pair")
    parser.add_argument("--host", help="where the engine listens")
    parser.add_argument("--port", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to wait for the engine")
    parser.add_argument("--model", help="this host's path of the checkpoint")
    parser.add_argument("--threads", type=int, help="where the engine's configuration says nothing")
    parser.add_argument("--token-file")
    return parser


def _inherited(fd: int) -> RankEnd:
    sock = socket.socket(fileno=fd)
    return RankEnd(sock, msgspec.msgpack.decode(receive_message(sock), type=StartRank))


def _from_elsewhere(options: argparse.Namespace) -> RankEnd:
    secret = read_secret(options.token_file)
    import_what_is_needed()  # takes seconds, in which the engine would wait

    application = Application(options.host, options.port, options.rank, options.world_size, options.wait)
    sock, start = application.join(secret)
    config = start.config
    config = msgspec.structs.replace(
        config, model=options.model or config.model, num_threads=config.num_threads or options.threads
    )
    seat = start.seat
    say(
        f"rank {seat.rank} of {seat.shape.size} has joined the engine at {options.host}:{options.port}: "
        f"part {seat.part} of stage {seat.stage}"
    )
    return RankEnd(sock, msgspec.structs.replace(start, config=config))


def main() -> None:
    """Serve, and end the process at once."""
    options = _parser().parse_args()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 decides
    try:
        end = _from_elsewhere(options) if options.fd is None else _inherited(options.fd)
    except EOFError:
        end_process(FAILED)  # the engine is gone before it has said anything
    except (ConchError, JoinError, NoEngineError) as error:
        say(f"error: {error}")
        end_process(FAILED if isinstance(error, NoEngineError) else REFUSED)
    end_process(serve(end))


if __name__ == "__main__":
    settle_environment()  # before anything imports torch
    main()
