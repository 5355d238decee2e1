"""A client that streams over HTTP in a thread, and notes how it ended."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Mapping, Sequence

from support.server import RunningServer, wait_until


class StreamClient(threading.Thread):
    """Reads one `generate_stream` until it ends, however it ends.

    Attributes
    ----------
    events
        Decoded bodies of the stream's events; one with "error" ends it.
    error
        What went wrong: the server's error, or how the connection ended; None while all is well.
    ended_at
        Monotonic time of the end; None while it goes on.
    """

    def __init__(self, server: RunningServer, model: str, request: Mapping[str, object]) -> None:
        super().__init__(daemon=True)
        self._port, self._model, self._request = server.ports["http"], model, request
        self.events: list[dict] = []
        self.error: str | None = None
        self.ended_at: float | None = None
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection("localhost", self._port, timeout=60)
        try:
            connection.request("POST", f"/v2/models/{self._model}/generate_stream", json.dumps(self._request))
            response, rest = connection.getresponse(), b""
            while chunk := response.read1():  # reading by lines would take a cut connection for an end
                *lines, rest = (rest + chunk).split(b"\n")
                for line in filter(None, lines):
                    self._take(json.loads(line.removeprefix(b"data:")))
            if rest:
                self._take(json.loads(rest.removeprefix(b"data:")))
        except (OSError, http.client.HTTPException) as error:
            self.error = repr(error)
        finally:
            connection.close()
            self.ended_at = time.monotonic()

    def _take(self, event: dict) -> None:
        self.events.append(event)
        self.error = event.get("error")

    @property
    def text(self) -> str:
        return "".join(event.get("text_output", "") for event in self.events)


def wait_until_streaming(clients: Sequence[StreamClient]) -> None:
    """Wait until each client has got something; fails if a stream ends before."""
    wait_until(lambda: all(len(client.events) > 1 for client in clients), 20, "streams under way")
    assert all(client.ended_at is None for client in clients), [client.events[-1] for client in clients]


def assert_all_end(clients: Sequence[StreamClient], since: float, within_s: float) -> None:
    """Wait for the end of all streams."""
    for client in clients:
        client.join(within_s)
        assert client.ended_at is not None and client.ended_at - since < within_s, "a client was left hanging"
