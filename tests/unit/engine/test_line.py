"""The line between two ranks: messages, signs of life, and what is said of a peer that is gone."""

from __future__ import annotations

import queue
import socket
import struct

import pytest

from conch.engine.mesh.line import Line, promptness, receive_message, send_message


class Ear:
    """Hears a line and its loss."""

    def __init__(self, sock, timeout_s=60.0, hear=None):
        self.messages = queue.Queue()
        self.losses = queue.Queue()
        self.line = Line(sock, hear or self.messages.put, self.losses.put, timeout_s)
        self.line.begin()


@pytest.fixture
def ends():
    pair = socket.socketpair()
    yield pair
    for sock in pair:
        sock.close()


def test_messages_arrive_whole_and_in_order_among_beats(ends):
    left, right = (Ear(sock) for sock in ends)
    sent = [b"a", bytes(3 << 20), b"c"]
    for message in sent:
        left.line.send(message)
    assert [right.messages.get(timeout=10) for _ in sent] == sent
    right.line.send(b"back")
    assert left.messages.get(timeout=10) == b"back"
    left.line.close(5.0)


def test_a_peer_that_lives_is_heard_even_if_it_says_nothing(ends):
    left, right = (Ear(sock, timeout_s=1.0) for sock in ends)
    with pytest.raises(queue.Empty):
        left.losses.get(timeout=2.5)
    assert right.losses.empty()
    left.line.close(5.0)


def test_a_peer_without_a_sign_of_life_is_lost(ends):
    assert Ear(ends[0], timeout_s=1.0).losses.get(timeout=30) == "has shown no sign of life for 1 s"


def test_who_serves_has_less_time_to_be_silent(ends):
    ear = Ear(ends[0], timeout_s=2.0)
    ear.line.expect_promptness()
    assert ear.losses.get(timeout=30) == "has shown no sign of life for 1 s"


def test_a_peer_that_stops_in_the_middle_of_a_message_is_lost(ends):
    ear = Ear(ends[0], timeout_s=1.0)
    ends[1].sendall(struct.pack("!I", 100) + b"half")
    assert ear.losses.get(timeout=30) == "has shown no sign of life for 1 s"


def test_a_peer_that_takes_nothing_does_not_hold_its_sender_for_ever(ends):
    ear = Ear(ends[0], timeout_s=1.0)
    with pytest.raises(OSError):
        for _ in range(100):
            ear.line.send(bytes(1 << 20))
    assert ear.losses.get(timeout=30) == "has shown no sign of life for 1 s"


def test_a_peer_that_hangs_up_is_lost_at_once(ends):
    ear = Ear(ends[0])
    ends[1].close()
    assert ear.losses.get(timeout=10) == "has hung up"


def test_what_was_said_last_is_heard_and_a_line_closed_here_is_no_loss(ends):
    left, right = (Ear(sock) for sock in ends)
    for _ in range(2):
        left.line.close(0.1)
        with pytest.raises(OSError):
            left.line.send(b"too late")
    assert right.losses.get(timeout=10) == "has hung up"
    assert left.losses.empty()


def test_a_message_that_cannot_be_read_is_a_loss(ends):
    def refuse(message):
        raise ValueError("not a word")

    ear = Ear(ends[0], hear=refuse)
    send_message(ends[1], b"?")
    assert ear.losses.get(timeout=10) == "sent what cannot be understood: ValueError: not a word"


def test_a_stranger_cannot_make_this_end_wait_for_gigabytes(ends):
    ends[1].sendall(struct.pack("!I", 1 << 31))
    with pytest.raises(ConnectionError, match="2147483648 bytes"):
        receive_message(ends[0], most_bytes=100)


def test_who_serves_answers_within_ten_seconds_or_half_of_the_timeout():
    assert promptness(60.0) == 10.0
    assert promptness(5.0) == 2.5
