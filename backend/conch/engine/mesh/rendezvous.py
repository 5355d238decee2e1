"""Where ranks of other hosts ask for their seats."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading

import msgspec

import conch
from conch.api.config import EngineConfig
from conch.api.errors import ConfigError
from conch.engine.mesh.line import receive_message, send_message
from conch.engine.mesh.link import Link
from conch.engine.mesh.messages import StartRank
from conch.engine.mesh.secret import WrongSecretError, prove_engine, read_secret

_ANSWER_WITHIN_S = 5.0
_MOST_BYTES = 4096

_log = logging.getLogger(__name__)


class SeatRequest(msgspec.Struct, frozen=True, tag="seat_request", kw_only=True):
    """What a rank says once it has proved that it knows the secret.

    Attributes
    ----------
    version
        Of its conch.
    rank, world_size
        Which rank it is to be, of how many; None takes any. See `seat_wanted`.
    name
        Of its process, for people to read.
    """

    version: str
    rank: int | None
    world_size: int | None
    name: str


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The answer to a rank that gets no seat.

    Attributes
    ----------
    is_final
        Whether it is of no use to ask again.
    """

    reason: str
    is_final: bool


class RefusedError(Exception):
    """A rank gets no seat."""

    def __init__(self, reason: str, is_final: bool = True) -> None:
        super().__init__(reason)
        self.is_final = is_final


class Rendezvous:
    """Listens until all ranks of other hosts are there, and is the `Body` of those that are not.

    Parameters
    ----------
    listener
        Bound to the address that the other hosts reach.
    config
        The engine's.
    secret
        Whoever does not know it gets no seat.
    """

    def __init__(self, listener: socket.socket, config: EngineConfig, secret: bytes) -> None:
        self._listener = listener
        self._config = config
        self._secret = secret
        self._free: dict[int, Link] = {}
        self._missing = config.remote_ranks
        self._size = 0
        self._lock = threading.Lock()
        self.address: str = listener.getsockname()[0]
        self.whence = f"from another host, to {config.master_addr}:{config.master_port}"

    @classmethod
    def open(cls, config: EngineConfig) -> Rendezvous:
        """Listen where the configuration says.

        Raises
        ------
        ConfigError
            That is not an address of this host, the port is taken, or there is no secret.
        """
        secret = read_secret(config.rank_token_file)
        where = (config.master_addr, config.master_port)
        try:
            family, *_, address = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(address[:2], family=family)
        except OSError as error:
            raise ConfigError(
                f"cannot listen at master_addr {where[0]}, master_port {where[1]}: {error}"
            ) from error
        return cls(listener, config, secret)

    def expect(self, link: Link) -> None:
        """Give this seat to a rank that comes; the last one opens the door."""
        self._size = link.seat.shape.size
        self._free[link.seat.rank] = link
        if len(self._free) == self._config.remote_ranks:
            threading.Thread(target=self._accept, name="conch-rendezvous", daemon=True).start()

    def fate(self, silence: str) -> str:
        """Say what is known of a rank that is not there."""
        return silence

    def end(self, timeout_s: float) -> None:
        """Wait for nobody any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, (host, *_) = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._admit, args=(sock, host), name="conch-admission", daemon=True
            ).start()

    def _admit(self, sock: socket.socket, host: str) -> None:
        """Give a seat to whoever is at the other end, if it may have one; it holds up nobody but itself."""
        sock.settimeout(_ANSWER_WITHIN_S)
        try:
            prove_engine(sock, self._secret)
            request = msgspec.msgpack.decode(receive_message(sock, _MOST_BYTES), type=SeatRequest)
            try:
                self._seat(sock, request, host)
            except RefusedError as error:
                send_message(sock, msgspec.msgpack.encode(Refusal(str(error), error.is_final)))
                raise
        except (OSError, EOFError, WrongSecretError, RefusedError, msgspec.MsgspecError) as error:
            _log.warning("a rank from %s was not admitted: %s", host, error)
            sock.close()

    def _seat(self, sock: socket.socket, request: SeatRequest, host: str) -> None:
        if request.version != conch.__version__:
            raise RefusedError(f"it runs conch {request.version}, the engine {conch.__version__}")
        wanted = seat_wanted(request, self._size, self._config.remote_ranks)
        with self._lock:
            rank = min(self._free, default=None) if wanted is None else wanted
            link = None if rank is None else self._free.pop(rank, None)
        if link is None:
            raise RefusedError(
                "all ranks are there" if wanted is None else f"rank {wanted} is there", is_final=False
            )
        whence = f"{request.name} of {host}"
        try:
            link.attach(sock, StartRank(self._config, link.seat, None), whence, Elsewhere())
        except OSError:
            with self._lock:
                self._free[link.seat.rank] = link  # for the next who asks
            raise
        with self._lock:
            self._missing -= 1
        if not self._missing:
            self.end(0.0)


class Elsewhere:
    """A process of another host: `conch.engine.mesh.link.Body`."""

    def fate(self, silence: str) -> str:
        """Say all that can be known."""
        return silence

    def end(self, timeout_s: float) -> None:
        """Force nothing: it ends by itself, having lost its line."""


def seat_wanted(request: SeatRequest, size: int, remote: int) -> int | None:
    """Return which rank of the mesh one from another host is to be; None for any.

    A launcher on the other hosts counts only those that it starts: its world is the `remote` last ranks,
    which it numbers from 0. One that counts the engine as well has a world of `size`, and its numbers are
    the mesh's.

    Raises
    ------
    RefusedError
        There is no such rank, or it is the engine's to start.
    """
    rank, world = request.rank, request.world_size
    first = size - remote
    if world not in (None, remote, size):
        raise RefusedError(
            f"WORLD_SIZE is {world}, but the engine awaits {remote} ranks of other hosts, of {size} in all"
        )
    if rank is None:
        return None
    wanted = first + rank if world == remote else rank
    if not first <= wanted < size:
        raise RefusedError(f"rank {wanted} is none of those from other hosts, {first} to {size - 1}")
    return wanted
