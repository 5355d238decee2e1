from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

pytest.importorskip("tritonclient.grpc")

import grpc
import numpy as np
from loadgen.grpc_client import GenerateRequest, LoadClient, greedy
from loadgen.latency import Trace
from tritonclient.grpc import service_pb2, service_pb2_grpc

Script = Callable[[Any], AsyncIterator[Any]]


def response(
    text: str | None = None, *, tokens: int = 1, reason: str = "", final: bool = False, error: str = ""
) -> Any:
    inner = service_pb2.ModelInferResponse()
    inner.parameters["triton_final_response"].bool_param = final
    if text is not None:
        for name, datatype, data in (
            ("text_output", "BYTES", len(text.encode()).to_bytes(4, "little") + text.encode()),
            ("finish_reason", "BYTES", len(reason).to_bytes(4, "little") + reason.encode()),
            ("num_output_tokens", "UINT32", np.array([tokens], np.uint32).tobytes()),
            ("num_input_tokens", "UINT32", np.array([3], np.uint32).tobytes()),
        ):
            inner.outputs.add(name=name, datatype=datatype, shape=[1])
            inner.raw_output_contents.append(data)
    return service_pb2.ModelStreamInferResponse(infer_response=inner, error_message=error)


@contextlib.asynccontextmanager
async def serving(script: Script) -> AsyncIterator[LoadClient]:
    """A gRPC server whose streams say what the script says."""

    class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
        async def ModelStreamInfer(self, request_iterator, context):
            async for request in request_iterator:
                async for answer in script(request):
                    yield answer

    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("localhost:0")
    await server.start()
    try:
        async with LoadClient(f"localhost:{port}") as client:
            yield client
    finally:
        await server.stop(None)


def stream(script: Script, request: GenerateRequest, **options: Any) -> Trace:
    async def run() -> Trace:
        async with serving(script) as client:
            return await client.stream(request, **options)

    return asyncio.run(run())


def test_deltas_are_joined_counted_and_stamped_in_order():
    async def script(request):
        yield response("Hel", tokens=2)
        yield response("lo", reason="length", final=True)

    seen = stream(script, greedy("hi", 3))
    assert seen.text == "Hello"
    assert [arrival.num_tokens for arrival in seen.arrivals] == [2, 1]
    assert seen.sent_s < seen.arrivals[0].at_s <= seen.arrivals[1].at_s
    assert (seen.finish_reason, seen.error, seen.num_prompt) == ("length", None, 3)
    assert (seen.num_finals, seen.num_after_final) == (1, 0)


def test_the_request_carries_the_tensors_of_the_vllm_backend():
    requests = []

    async def script(request):
        requests.append(request)
        yield response(final=True)

    stream(script, GenerateRequest("hé", {"max_tokens": 2}, return_ids=True))
    (request,) = requests
    sent = dict(zip([tensor.name for tensor in request.inputs], request.raw_input_contents, strict=True))
    assert sent["text_input"][4:].decode() == "hé"
    assert json.loads(sent["sampling_parameters"][4:]) == {"max_tokens": 2}
    assert sent["stream"] == b"\x01"
    assert sent["return_output_ids"] == b"\x01"


def test_token_ids_are_sent_instead_of_the_text():
    requests = []

    async def script(request):
        requests.append(request)
        yield response(final=True)

    stream(script, GenerateRequest("unused", input_ids=(5, 6)))
    sent = dict(
        zip([tensor.name for tensor in requests[0].inputs], requests[0].raw_input_contents, strict=True)
    )
    assert np.frombuffer(sent["input_ids"], np.int64).tolist() == [5, 6]
    assert "text_input" not in sent


def test_an_empty_final_response_is_a_final_and_no_arrival():
    async def script(request):
        yield response("a")
        yield response(final=True)

    seen = stream(script, greedy("hi", 1))
    assert (len(seen.arrivals), seen.num_finals) == (1, 1)


def test_whatever_comes_after_the_final_response_is_counted():
    async def script(request):
        yield response("a", final=True)
        yield response("b")
        yield response(final=True)

    seen = stream(script, greedy("hi", 1))
    assert (seen.num_finals, seen.num_after_final) == (2, 2)


def test_an_error_is_reported_with_its_final_flag():
    async def script(request):
        yield response(error="temperature: must be a number", final=True)

    seen = stream(script, greedy("hi", 1))
    assert seen.error == "temperature: must be a number"
    assert (seen.num_finals, seen.arrivals) == (1, ())


def test_a_client_that_leaves_says_so_and_stops_reading():
    async def script(request):
        while True:
            yield response("x")
            await asyncio.sleep(0)

    seen = stream(script, greedy("hi", 1), leave_when=lambda tokens: tokens >= 3)
    assert seen.cancelled
    assert seen.num_tokens == 3


def test_a_stream_that_does_not_end_runs_into_its_limit():
    async def script(request):
        yield response("x")
        await asyncio.sleep(30)

    seen = stream(script, greedy("hi", 1), timeout_s=0.3)
    assert seen.error is not None
    assert seen.error.startswith("DEADLINE_EXCEEDED")
    assert seen.num_finals == 0
