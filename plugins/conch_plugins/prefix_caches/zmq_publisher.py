"""Publishes KV events on a ZMQ socket, as vLLM does: topic, sequence number, batch."""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from contextlib import suppress

import msgspec
import zmq

from conch.api import ConfigError
from conch.api.kv_events import KVEventsConfig
from conch_plugins.prefix_caches.kv_events import KVEventBatch

_SEQUENCE_BYTES = 8
_END_OF_REPLAY = b"\xff" * _SEQUENCE_BYTES
_LINGER_MS = 500
_CLOSING_S = 2.0

_log = logging.getLogger(__name__)


class ZmqPublisher:
    """A thread that owns the sockets; the engine only puts batches into its queue.

    Whoever subscribes late or too slowly misses batches: the sequence numbers tell, and the replay socket has
    those of late. A batch that finds the queue full is lost, but has a number.

    Parameters
    ----------
    config
        Endpoints and bounds.

    Raises
    ------
    ConfigError
        An endpoint cannot be used.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        self._topic = config.topic.encode()
        self._max_queue_size = config.max_queue_size
        self._queue: deque[tuple[int, KVEventBatch]] = deque()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._next_sequence = 0
        self._is_closing = False
        self._context = zmq.Context()
        self._ear, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        try:
            self._pub = self._open(zmq.PUB, config.endpoint, config.hwm, binds=_is_bound(config.endpoint))
            self._replay = self._open(zmq.ROUTER, config.replay_endpoint, config.hwm, binds=True)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, batch: KVEventBatch) -> None:
        """Queue a batch, or lose it; one that comes after the end is lost."""
        if self._is_closing:
            return
        sequence = self._next_sequence
        self._next_sequence += 1
        if len(self._queue) >= self._max_queue_size:
            if sequence % self._max_queue_size == 0:
                _log.warning("KV events come faster than they can be published: batches are lost")
            return
        self._queue.append((sequence, batch))
        self._ring()

    def close(self) -> None:
        """Send what is queued, within two seconds, and close the sockets; safe to repeat."""
        if self._is_closing:
            return
        self._is_closing = True
        self._ring()
        self._thread.join(_CLOSING_S)

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # the bell rings already
            self._bell.send(b"!")

    def _open(self, kind: int, endpoint: str | None, hwm: int, binds: bool) -> zmq.Socket[bytes] | None:
        if endpoint is None:
            return None
        opened: zmq.Socket[bytes] = self._context.socket(kind)
        opened.set_hwm(hwm)
        opened.setsockopt(zmq.LINGER, _LINGER_MS)
        try:
            if binds:
                opened.bind(endpoint)
            else:
                opened.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"kv_events_config: cannot open {endpoint!r}: {error}") from error
        return opened

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._ear, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        encoder = msgspec.msgpack.Encoder()
        while not self._is_closing or self._queue:
            ready = dict(poller.poll())
            if self._ear.fileno() in ready:
                self._ear.recv(4096)
            while self._queue:
                self._send(*self._queue.popleft(), encoder)
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
        for opened in (self._pub, self._replay):
            if opened is not None:
                opened.close()
        self._context.term()
        self._ear.close()
        self._bell.close()

    def _send(self, sequence: int, batch: KVEventBatch, encoder: msgspec.msgpack.Encoder) -> None:
        number, payload = sequence.to_bytes(_SEQUENCE_BYTES, "big"), encoder.encode(batch)
        self._sent.append((number, payload))
        assert self._pub is not None, "its endpoint has a default"
        try:
            self._pub.send_multipart((self._topic, number, payload), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _log.warning("KV events of batch %d could not be sent: %s", sequence, error)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send all that is kept from a number on, and an empty batch as its end."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != _SEQUENCE_BYTES:
            _log.warning("a replay of KV events was asked for in %d frames that make no sense", len(frames))
            return
        asker, delimiter, first = frames
        for number, payload in self._sent:
            if number >= first:
                replay.send_multipart((asker, delimiter, number, payload))
        replay.send_multipart((asker, delimiter, _END_OF_REPLAY, b""))


def _is_bound(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
