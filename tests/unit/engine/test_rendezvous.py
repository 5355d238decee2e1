"""Who gets which seat of a mesh, and who gets none."""

from __future__ import annotations

import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

import conch
from conch.api import ConfigError, EngineConfig
from conch.api.mesh import MeshError, MeshShape, RankJoined, Seat
from conch.engine.mesh.joining import Application, JoinError, NoEngineError
from conch.engine.mesh.line import send_message
from conch.engine.mesh.link import Link
from conch.engine.mesh.losses import Losses
from conch.engine.mesh.meeting import Meeting
from conch.engine.mesh.rendezvous import RefusedError, Rendezvous, SeatRequest, seat_wanted
from conch.engine.mesh.secret import TOKEN_VARIABLE, WrongSecretError, prove_engine, prove_rank, read_secret
from support.server import wait_until

SECRET = b"a secret that is long enough"


class Door:
    """A rendezvous of a mesh of four ranks, two of which come from elsewhere."""

    def __init__(self, monkeypatch):
        monkeypatch.setenv(TOKEN_VARIABLE, SECRET.decode())
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        config = EngineConfig(
            model="m", tensor_parallel_size=4, remote_ranks=2, master_addr="127.0.0.1", master_port=self.port
        )
        self.lost = queue.Queue()
        self.meeting, losses = Meeting("127.0.0.1"), Losses(self.lost.put)
        self.rendezvous = Rendezvous.open(config)
        seats = [Seat(rank, MeshShape(4, 1), 20.0) for rank in (2, 3)]
        self.links = [Link(seat, "elsewhere", self.meeting, losses, self.rendezvous) for seat in seats]
        for link in self.links:
            self.rendezvous.expect(link)

    def ask(self, rank=None, world_size=None, wait_s=10.0, secret=SECRET):
        return Application("127.0.0.1", self.port, rank, world_size, wait_s).join(secret)

    def is_shut(self):
        with socket.socket() as late:
            return late.connect_ex(("127.0.0.1", self.port)) != 0

    def close(self):
        for link in self.links:
            link.end(0.1)


@pytest.fixture
def door(monkeypatch):
    opened = Door(monkeypatch)
    yield opened
    opened.close()


def test_any_rank_takes_the_first_seat_and_a_named_one_its_own(door):
    sock, start = door.ask(rank=1, world_size=2)
    assert start.seat.rank == 3
    assert start.address is None, "its address is that of its own end"
    second, start = door.ask()
    assert start.seat.rank == 2
    for link, end in zip(door.links, (second, sock), strict=True):
        send_message(end, msgspec.msgpack.encode(RankJoined()))
        assert link.receive(10.0) == RankJoined()
        assert "of 127.0.0.1" in link.whence
    wait_until(door.is_shut, 10, "end of listening for nobody")
    for end in (sock, second):
        end.close()


def test_a_rank_that_hangs_up_is_lost_by_name(door):
    door.ask()[0].close()
    found = r"rank 2 of the mesh \(process \d+ of 127.0.0.1\) has hung up"
    with pytest.raises(MeshError, match=found):
        door.links[0].receive(10.0)
    assert door.lost.get(timeout=10).endswith("has hung up")


def test_a_seat_that_is_taken_is_waited_for(door):
    sock, _ = door.ask(rank=2)
    with pytest.raises(NoEngineError, match="rank 2 is there"):
        door.ask(rank=2, wait_s=0.1)
    sock.close()


def test_an_engine_that_is_not_there_is_waited_for_no_longer_than_told():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # and does not listen
        port = sock.getsockname()[1]
        with pytest.raises(NoEngineError, match=rf"no engine at 127.0.0.1:{port} within 0.1 s"):
            Application("127.0.0.1", port, None, None, 0.1).join(SECRET)


def test_who_does_not_know_the_secret_gets_no_seat_and_holds_up_nobody(door):
    with socket.create_connection(("127.0.0.1", door.port)), pytest.raises(JoinError, match="another secret"):
        door.ask(secret=b"what might it be?")
    door.ask()[0].close()


def test_another_release_is_refused(door, monkeypatch):
    monkeypatch.setattr(conch, "__version__", "0.0.1")
    told = SeatRequest(version="0.0.2", rank=None, world_size=None, name="process 1")
    with pytest.raises(RefusedError, match=r"it runs conch 0\.0\.2, the engine 0\.0\.1"):
        door.rendezvous._seat(None, told, "127.0.0.1")


@pytest.mark.parametrize(
    ("rank", "world_size", "wanted"),
    [(None, None, None), (None, 2, None), (0, 2, 2), (1, 2, 3), (2, 4, 2), (3, None, 3)],
)
def test_ranks_are_numbered_by_the_launcher_or_by_the_mesh(rank, world_size, wanted):
    request = SeatRequest(version="", rank=rank, world_size=world_size, name="")
    assert seat_wanted(request, 4, 2) == wanted


@pytest.mark.parametrize(
    ("rank", "world_size", "reason"),
    [
        (0, 3, "WORLD_SIZE is 3, but the engine awaits 2 ranks of other hosts, of 4 in all"),
        (1, 4, "rank 1 is none of those from other hosts, 2 to 3"),
        (4, None, "rank 4 is none"),
        (2, 2, "rank 4 is none"),
    ],
)
def test_ranks_that_there_are_not_are_refused(rank, world_size, reason):
    request = SeatRequest(version="", rank=rank, world_size=world_size, name="")
    with pytest.raises(RefusedError, match=reason):
        seat_wanted(request, 4, 2)


def test_both_ends_must_know_the_secret():
    def meet(ours, theirs):
        engine, rank = socket.socketpair()
        failed = []

        def prove():
            try:
                prove_engine(engine, ours)
            except WrongSecretError as error:
                failed.append(error)

        with engine, rank:
            thread = threading.Thread(target=prove)
            thread.start()
            try:
                prove_rank(rank, theirs)
            except WrongSecretError as error:
                failed.append(error)
            thread.join()
        return len(failed)

    assert meet(SECRET, SECRET) == 0
    assert meet(SECRET, b"another") == 2


def test_an_engine_that_only_repeats_what_it_hears_proves_nothing():
    engine, rank = socket.socketpair()
    with engine, rank:
        send_message(engine, bytes(32))

        def parrot():
            engine.recv(4)
            said = engine.recv(64)
            send_message(engine, said[32:])

        thread = threading.Thread(target=parrot)
        thread.start()
        with pytest.raises(WrongSecretError):
            prove_rank(rank, SECRET)
        thread.join()


def test_a_secret_comes_from_its_file_or_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_bytes(SECRET + b"\n")
    monkeypatch.setenv(TOKEN_VARIABLE, "of the environment, long enough")
    assert read_secret(str(path)) == SECRET
    assert read_secret(None) == b"of the environment, long enough"
    path.write_text("short")
    with pytest.raises(ConfigError, match="at least 16 characters"):
        read_secret(str(path))
    with pytest.raises(ConfigError, match=r"rank_token_file .* cannot be read: No such file"):
        read_secret(str(tmp_path / "none"))


def test_notes_reach_ranks_that_come_later():
    class Line:
        def __init__(self):
            self.told = []

        def send(self, message):
            self.told.append(message)

    early, late = Line(), Line()
    meeting = Meeting("127.0.0.1")
    meeting.join(early)
    meeting.post("a", b"1")
    meeting.join(late)
    assert early.told == late.told and len(late.told) == 1
    assert meeting.read("a", 1.0) == b"1"
    with pytest.raises(MeshError, match=r"nobody has told 'b' within distributed_timeout_seconds \(0\.01\)"):
        meeting.read("b", 0.01)


def test_nobody_waits_for_a_note_once_a_rank_is_lost(door):
    sock, _ = door.ask()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(door.meeting.read, "address", 3600.0)
        sock.close()
        with pytest.raises(MeshError, match=r"nobody tells 'address' any more: rank 2 .* has hung up"):
            waiting.result()
    door.meeting.post("said", b"1")
    assert door.meeting.read("said", 1.0) == b"1"
