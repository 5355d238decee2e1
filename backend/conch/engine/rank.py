"""``python -m conch.engine.rank --fd N``: one rank of a mesh, which takes orders on an inherited socket."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import msgspec

from conch.api.mesh import RankFailed, RankJoined, RankNews, RankOrder, RankReady
from conch.engine.environment import settle_environment
from conch.engine.ranks import StartRank

if TYPE_CHECKING:
    from conch.worker import FollowingWorker


class RankEnd:
    """A rank's end of the socket."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._orders = msgspec.msgpack.Decoder(RankOrder)
        self._encoder = msgspec.msgpack.Encoder()

    def receive_start(self) -> StartRank:
        """Return what this rank is to be."""
        return msgspec.msgpack.decode(self._connection.recv_bytes(), type=StartRank)

    def receive(self) -> RankOrder:
        """Return the next order. Raises EOFError when rank 0 is gone."""
        return self._orders.decode(self._connection.recv_bytes())

    def send(self, news: RankNews) -> None:
        """Tell rank 0."""
        self._connection.send_bytes(self._encoder.encode(news))


def serve(end: RankEnd) -> int:
    """Take orders until rank 0 hangs up; return the exit status."""
    try:
        worker = _join(end)
        end.send(RankReady.of_sizes(worker.num_blocks, worker.num_slots))
        while True:
            worker.execute(end.receive())
    except (EOFError, ConnectionError):
        return 0
    except Exception as error:
        return _report(end, error)


def _join(end: RankEnd) -> FollowingWorker:
    start = end.receive_start()
    from conch.engine.build import build_follower

    end.send(RankJoined())
    return build_follower(start.config, start.seat)


def _report(end: RankEnd, error: Exception) -> int:
    """Tell why this rank ends, to rank 0 if it is still there: else it is why."""
    try:
        end.send(RankFailed(f"{type(error).__name__}: {error}"))
    except OSError:
        return 0
    traceback.print_exc()
    return 1


def main() -> None:
    """Serve, and end the process at once."""
    from conch.engine.process import die_with_parent

    parser = argparse.ArgumentParser(prog="python -m conch.engine.rank", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited end of a socket pair")
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 decides
    status = serve(RankEnd(Connection(parser.parse_args().fd)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    settle_environment()  # before anything imports torch
    main()
