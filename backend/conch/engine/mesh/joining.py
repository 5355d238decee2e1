"""How a rank of another host finds its engine."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass

import msgspec

import conch
from conch.engine.mesh.line import receive_message, send_message
from conch.engine.mesh.messages import StartRank
from conch.engine.mesh.rendezvous import Refusal, SeatRequest
from conch.engine.mesh.secret import WrongSecretError, prove_rank

_PAUSE_S = 0.5
_ANSWER_WITHIN_S = 5.0


class JoinError(Exception):
    """The engine does not take this rank, and would not if it were asked again."""


class NoEngineError(Exception):
    """There is no engine that has a seat for this rank."""


@dataclass(frozen=True, slots=True)
class Application:
    """What a rank of another host asks for.

    Attributes
    ----------
    host, port
        Where the engine listens.
    rank, world_size
        See `conch.engine.mesh.rendezvous.seat_wanted`.
    wait_s
        How long to wait for the engine.
    """

    host: str
    port: int
    rank: int | None
    world_size: int | None
    wait_s: float

    def join(self, secret: bytes) -> tuple[socket.socket, StartRank]:
        """Wait for the engine, and take a seat.

        Raises
        ------
        JoinError
            The engine refuses this rank.
        NoEngineError
            It has not come in time.
        """
        deadline_s = time.monotonic() + self.wait_s
        told = ""
        while True:
            try:
                return self._ask(secret)
            except (
                OSError,
                EOFError,
            ) as error:  # not there yet, or no seat is free until another one has ended
                reason = str(error) or "it has hung up"
            if reason != told:
                print(
                    f"conch: waiting for the engine at {self.host}:{self.port}: {reason}",
                    file=sys.stderr,
                    flush=True,
                )
                told = reason
            if time.monotonic() > deadline_s:
                raise NoEngineError(
                    f"no engine at {self.host}:{self.port} within {self.wait_s:g} s: {reason}"
                )
            time.sleep(_PAUSE_S)

    def _ask(self, secret: bytes) -> tuple[socket.socket, StartRank]:
        sock = socket.create_connection((self.host, self.port), timeout=_ANSWER_WITHIN_S)
        try:
            prove_rank(sock, secret)
            request = SeatRequest(
                version=conch.__version__, rank=self.rank, world_size=self.world_size, name=_own_name()
            )
            send_message(sock, msgspec.msgpack.encode(request))
            answer = msgspec.msgpack.decode(receive_message(sock), type=StartRank | Refusal)
            if isinstance(answer, Refusal):
                raise JoinError(answer.reason) if answer.is_final else ConnectionError(answer.reason)
        except (WrongSecretError, msgspec.MsgspecError) as error:
            sock.close()
            raise JoinError(f"the engine at {self.host}:{self.port}: {error}") from error
        except BaseException:
            sock.close()
            raise
        sock.settimeout(None)
        return sock, answer


def _own_name() -> str:
    """Return what this process is called in messages: a launcher's numbers where it has some."""
    name = f"process {os.getpid()}"
    numbers = [
        f"{variable} {os.environ[variable]}"
        for variable in ("GROUP_RANK", "LOCAL_RANK")
        if variable in os.environ
    ]
    return f"{name} ({', '.join(numbers)})" if numbers else name
