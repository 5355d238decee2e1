"""An asyncio client of Triton's gRPC stream that stamps each response as it comes in.

It speaks the generated protocol directly: the higher client hides the parameters of a response that is an
error, and whether that response was the final one is what the soak asks.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc

from loadgen.latency import Arrival, Trace

MAX_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True)
class GenerateRequest:
    """One request in the tensors of Triton's vLLM backend.

    Attributes
    ----------
    sampling
        Sent as JSON in `sampling_parameters`.
    input_ids
        The prompt as token ids; sent instead of the text where given.
    return_ids
        Whether the answer shall hold token ids.
    """

    text: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    input_ids: tuple[int, ...] | None = None
    return_ids: bool = False


def greedy(text: str, max_tokens: int) -> GenerateRequest:
    """Return a request for exactly `max_tokens` tokens, the likeliest ones."""
    return GenerateRequest(text, {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True})


def never(num_tokens: int) -> bool:
    """Stay to the end, however many tokens come."""
    return False


class LoadClient:
    """Streams requests to one model; one gRPC stream for each, so that each can be left on its own."""

    def __init__(self, url: str, model: str = "smollm2") -> None:
        self._url = url
        self._model = model

    async def __aenter__(self) -> LoadClient:
        """Open the channel."""
        limits = [(f"grpc.max_{way}_message_length", MAX_MESSAGE_BYTES) for way in ("send", "receive")]
        self._channel = grpc.aio.insecure_channel(self._url, options=limits)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the channel."""
        await self._channel.close()

    async def stream(
        self,
        request: GenerateRequest,
        *,
        leave_when: Callable[[int], bool] = never,
        on_arrival: Callable[[Arrival], None] | None = None,
        timeout_s: float = 600.0,
    ) -> Trace:
        """Send one request and read its stream to the end of the stream, not only to the final response.

        Parameters
        ----------
        leave_when
            Asked after each response with the tokens so far; the client leaves where it says so.
        on_arrival
            Called with each response that carries tokens.
        timeout_s
            Bound on the whole stream; running over it is reported as the trace's `error`.
        """
        reading = _Reading(sent_s=time.perf_counter())
        call = self._stub.ModelStreamInfer(_once(self._message(request)), timeout=timeout_s)
        try:
            async for response in call:
                arrival = reading.take(response, time.perf_counter())
                if arrival and on_arrival:
                    on_arrival(arrival)
                if leave_when(reading.num_tokens):
                    reading.cancelled = True
                    call.cancel()
                    break
        except grpc.RpcError as error:
            reading.error = f"{error.code().name}: {error.details()}"
        return reading.trace()

    def _message(self, request: GenerateRequest) -> Any:  # noqa: ANN401 - generated without types
        message = service_pb2.ModelInferRequest(model_name=self._model)
        if request.input_ids is None:
            _add_text(message, "text_input", request.text)
        else:
            _add_tensor(message, "input_ids", "INT64", np.array(request.input_ids, dtype=np.int64))
        _add_text(message, "sampling_parameters", json.dumps(dict(request.sampling)))
        for name in ("stream", *_RETURNS):
            _add_tensor(message, name, "BOOL", np.array([True]))
        if request.return_ids:
            _add_tensor(message, "return_output_ids", "BOOL", np.array([True]))
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        return message


_RETURNS = (
    "exclude_input_in_output",
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
)


async def _once(message: Any) -> AsyncIterator[Any]:  # noqa: ANN401 - generated without types
    yield message


def _add_text(message: Any, name: str, text: str) -> None:  # noqa: ANN401
    data = text.encode()
    message.inputs.add(name=name, datatype="BYTES", shape=[1])
    message.raw_input_contents.append(len(data).to_bytes(4, "little") + data)


def _add_tensor(message: Any, name: str, datatype: str, values: np.ndarray[Any, Any]) -> None:  # noqa: ANN401
    message.inputs.add(name=name, datatype=datatype, shape=list(values.shape))
    message.raw_input_contents.append(values.tobytes())


@dataclass
class _Reading:
    """What has come of one stream so far; written by `take`, and by the stream's reader on its ending."""

    sent_s: float
    arrivals: list[Arrival] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_finals: int = 0
    num_after_final: int = 0
    finish_reason: str | None = None
    num_prompt: int | None = None
    error: str | None = None
    cancelled: bool = False

    def take(self, response: Any, at_s: float) -> Arrival | None:  # noqa: ANN401
        self.num_after_final += self.num_finals > 0
        self.num_finals += response.infer_response.parameters["triton_final_response"].bool_param
        if response.error_message:
            self.error = response.error_message
            return None
        result = InferResult(response.infer_response)
        text = _first(result, "text_output")
        if text is None:
            return None  # an empty response that only says "final"
        self.texts.append(text.decode())
        count = _first(result, "num_output_tokens")
        self._take_details(result)
        arrival = Arrival(at_s, 1 if count is None else int(count))
        if not arrival.num_tokens:
            return None
        self.arrivals.append(arrival)
        self.num_tokens += arrival.num_tokens
        return arrival

    def _take_details(self, result: InferResult) -> None:
        reason = _first(result, "finish_reason")
        if reason is not None and reason.decode() not in ("", "null", "None"):
            self.finish_reason = reason.decode()
        num_prompt = _first(result, "num_input_tokens")
        if num_prompt is not None:
            self.num_prompt = int(num_prompt)
        ids = result.as_numpy("output_ids")
        if ids is not None:
            self.output_ids.extend(int(token_id) for token_id in ids.reshape(-1))

    def trace(self) -> Trace:
        return Trace(
            sent_s=self.sent_s,
            arrivals=tuple(self.arrivals),
            finish_reason=self.finish_reason,
            error=self.error,
            cancelled=self.cancelled,
            num_finals=self.num_finals,
            num_after_final=self.num_after_final,
            num_prompt=self.num_prompt,
            text="".join(self.texts),
            output_ids=tuple(self.output_ids),
        )


def _first(result: InferResult, name: str) -> Any:  # noqa: ANN401
    values = result.as_numpy(name)
    return values.reshape(-1)[0] if values is not None and values.size else None
