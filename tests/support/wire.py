"""Clients of a served model, one for each of Triton's front ends, and its metrics."""

from __future__ import annotations

import http.client
import json
import queue
import re
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import tritonclient.grpc as grpc

from support.server import RunningServer

TIMEOUT_S = 60.0
ASKS_FOR_ALL = (
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_output_ids",
    "return_timings",
)
_METRIC = re.compile(r"(?P<name>[a-zA-Z_:]+)\{(?P<labels>[^}]*)\} (?P<value>\S+)")


@dataclass
class Answer:
    """All that came back for one request; a failed one has `error`.

    Attributes
    ----------
    status
        Of HTTP; None over gRPC.
    deltas, counts
        The `text_output` of each response, and its number of tokens where asked for.
    ids
        The request's id as each response repeats it.
    """

    status: int | None = None
    deltas: list[str] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_input: int | None = None
    finish_reason: str | None = None
    timings: dict = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def text(self) -> str:
        """CAT(stream)."""
        return "".join(self.deltas)

    @property
    def num_output(self) -> int:
        return sum(self.counts)

    @property
    def cached(self) -> int:
        return self.timings["num_cached_tokens"]

    def take(self, outputs: Mapping[str, object]) -> None:
        """Take one response's tensors, each a value or a list."""
        if "error" in outputs:
            assert self.error is None, "two errors for one request"
            self.error = str(outputs["error"])
            return
        if "id" in outputs:
            self.ids.append(str(outputs["id"]))
        self.deltas.append(str(_single(outputs.get("text_output", ""))))
        self.output_ids += _listed(outputs.get("output_ids", []))
        self.counts.append(int(_single(outputs.get("num_output_tokens", 0))))
        if "num_input_tokens" in outputs:
            self.num_input = int(_single(outputs["num_input_tokens"]))
        reason = _single(outputs.get("finish_reason", "None"))
        if reason != "None":
            assert self.finish_reason is None, "an answer after the end"
            self.finish_reason = str(reason)
        if "timings" in outputs:
            self.timings = json.loads(_single(outputs["timings"]))

    def take_arrays(self, result: grpc.InferResult) -> None:
        """Take one gRPC response; one that only says that it is the last has nothing to take."""
        names = [output.name for output in result.get_response().outputs]
        if names:
            self.take({name: _plain(result.as_numpy(name)) for name in names})


class ServedModel:
    """One model of a running server."""

    def __init__(self, server: RunningServer, name: str) -> None:
        self.server, self.name = server, name

    def post(self, verb: str, body: bytes, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
        """Send any bytes; returns status and body."""
        connection = http.client.HTTPConnection("localhost", self.server.ports["http"], timeout=timeout_s)
        try:
            connection.request("POST", f"/v2/models/{self.name}/{verb}", body)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def generate(self, body: Mapping[str, object], timeout_s: float = TIMEOUT_S) -> Answer:
        """Ask for one response over HTTP."""
        status, reply = self.post("generate", json.dumps(dict(body)).encode(), timeout_s)
        answer = Answer(status)
        answer.take(json.loads(reply))
        return answer

    def stream(self, body: Mapping[str, object], timeout_s: float = TIMEOUT_S) -> Answer:
        """Ask for a stream over HTTP."""
        sent = json.dumps({"stream": True, **body}).encode()
        status, reply = self.post("generate_stream", sent, timeout_s)
        answer = Answer(status)
        for event in parse_events(reply):
            answer.take(event)
        return answer

    def grpc(self, body: Mapping[str, object], request_id: str = "", timeout_s: float = TIMEOUT_S) -> Answer:
        """Ask for a stream over gRPC; `body` has the names of the HTTP front end's."""
        tensors, parameters = as_tensors({"stream": True, **body})
        return self.grpc_tensors(tensors, parameters, request_id, timeout_s)

    def grpc_tensors(
        self,
        tensors: Sequence[grpc.InferInput],
        parameters: Mapping[str, object] | None = None,
        request_id: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> Answer:
        """Send any tensors; reads up to the response that is marked as the last."""
        came: queue.SimpleQueue = queue.SimpleQueue()
        answer = Answer()
        with grpc.InferenceServerClient(self.server.grpc) as client:
            client.start_stream(lambda result, error: came.put((result, error)))
            client.async_stream_infer(
                self.name,
                list(tensors),
                request_id=request_id,
                parameters=dict(parameters or {}) or None,
                enable_empty_final_response=True,
            )
            is_last = False
            while not is_last:
                result, error = came.get(timeout=timeout_s)
                if error is not None:
                    answer.take({"error": error.message()})
                    break
                response = result.get_response()
                is_last = response.parameters["triton_final_response"].bool_param
                answer.ids.append(response.id)
                answer.take_arrays(result)
            client.stop_stream()
        return answer

    def grpc_together(
        self, bodies: Mapping[str, Mapping[str, object]], timeout_s: float = TIMEOUT_S
    ) -> dict[str, Answer]:
        """Send requests with these ids at once on one stream; tells their responses apart by id alone."""
        came: queue.SimpleQueue = queue.SimpleQueue()
        answers = {request_id: Answer() for request_id in bodies}
        alive = set(bodies)
        with grpc.InferenceServerClient(self.server.grpc) as client:
            client.start_stream(lambda result, error: came.put((result, error)))
            for request_id, body in bodies.items():
                tensors, parameters = as_tensors({"stream": True, **body})
                client.async_stream_infer(
                    self.name,
                    tensors,
                    request_id=request_id,
                    parameters=parameters or None,
                    enable_empty_final_response=True,
                )
            while alive:
                result, error = came.get(timeout=timeout_s)
                assert error is None, error
                response = result.get_response()
                assert response.id in alive, f"a response for {response.id!r}, which is not awaited"
                answers[response.id].ids.append(response.id)
                answers[response.id].take_arrays(result)
                if response.parameters["triton_final_response"].bool_param:
                    alive.remove(response.id)
            client.stop_stream()
        return answers

    def metric(self, name: str, **labels: str) -> float:
        """Sum the samples of ``conch:name`` of this model."""
        wanted = {f'{key}="{value}"' for key, value in {"model": self.name, **labels}.items()}
        found = [
            float(sample["value"])
            for sample in _METRIC.finditer(_read(self.server.metrics))
            if sample["name"] == f"conch:{name}" and wanted <= set(sample["labels"].split(","))
        ]
        assert found, f"no metric conch:{name} of {self.name}"
        return sum(found)


def parse_events(body: bytes) -> list[dict]:
    """Return the events of a stream; a body that is one JSON object is one event."""
    if body.startswith(b"{"):
        return [json.loads(body)]
    events = [line.removeprefix(b"data:") for line in body.splitlines() if line.startswith(b"data:")]
    return [json.loads(event) for event in events]


def as_tensors(body: Mapping[str, object]) -> tuple[list[grpc.InferInput], dict[str, object]]:
    """Split a body as Triton's generate endpoint does: known names are tensors, others parameters."""
    tensors, parameters = [], dict(body.get("parameters", {}))
    for name, value in body.items():
        if name in ("text_input", "sampling_parameters", "messages", "cache_salt"):
            raw = value if isinstance(value, bytes) else str(value).encode()
            tensors.append(tensor(name, "BYTES", np.array([raw], dtype=object)))
        elif name == "input_ids":
            tensors.append(tensor(name, "INT64", np.array(value, dtype=np.int64)))
        elif isinstance(value, bool):
            tensors.append(tensor(name, "BOOL", np.array([value])))
        elif name != "parameters":
            parameters[name] = value
    return tensors, parameters


def tensor(name: str, datatype: str, array: np.ndarray) -> grpc.InferInput:
    """Return an input tensor."""
    made = grpc.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def _plain(array: np.ndarray) -> list:
    return [item.decode() if isinstance(item, bytes) else item for item in array.reshape(-1).tolist()]


def _single(value):
    return value[0] if isinstance(value, list) else value


def _listed(value) -> list:
    return value if isinstance(value, list) else [value]


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as page:
        return page.read().decode()
