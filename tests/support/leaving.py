"""Clients that leave before their answer is complete."""

from __future__ import annotations

import json
import queue
import socket
import struct
from collections.abc import Mapping

import tritonclient.grpc as grpc

from support.wire import ServedModel, as_tensors

RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class HttpLeaver:
    """A raw HTTP connection that ends with a reset, as one that a process leaves behind."""

    def __init__(self, model: ServedModel, body: Mapping[str, object], verb: str = "generate_stream") -> None:
        payload = json.dumps({**body, "stream": verb == "generate_stream"}).encode()
        head = f"POST /v2/models/{model.name}/{verb} HTTP/1.1\r\nHost: localhost\r\n"
        self._socket = socket.create_connection(("localhost", model.server.ports["http"]), timeout=30)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self._socket.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        self.received = b""

    def read_events(self, count: int) -> None:
        """Read until this many events have come."""
        while self.received.count(b"data:") < count:
            chunk = self._socket.recv(4096)
            assert chunk, "the stream ended before the client wanted to leave"
            self.received += chunk
            assert self.received.startswith(b"HTTP/1.1 200"), self.received
            assert not self.received.endswith(b"\r\n0\r\n\r\n"), "the answer was complete before that"

    def read_to_the_end(self) -> bool:
        """Read what is left; whether the server has closed the connection."""
        try:
            while chunk := self._socket.recv(1 << 16):
                self.received += chunk
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        return True

    def leave(self) -> None:
        self._socket.close()


class GrpcLeaver:
    """A gRPC stream that is cancelled."""

    def __init__(self, model: ServedModel, body: Mapping[str, object]) -> None:
        tensors, parameters = as_tensors({**body, "stream": True})
        self._came: queue.SimpleQueue = queue.SimpleQueue()
        self._client = grpc.InferenceServerClient(model.server.grpc)
        self._client.start_stream(lambda result, error: self._came.put((result, error)))
        self._client.async_stream_infer(model.name, tensors, parameters=parameters or None)

    def read_events(self, count: int) -> None:
        """Read this many responses."""
        for _ in range(count):
            _, error = self._came.get(timeout=30)
            assert error is None, error

    def leave(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()
