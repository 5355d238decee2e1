"""Requests as clients of Triton's vLLM backend send them, unchanged."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping

import numpy as np
import pytest
import tritonclient.grpc as sync_grpc
import tritonclient.grpc.aio as grpc
from tritonclient.utils import InferenceServerException

from support.lab import Lab
from support.wire import ServedModel, parse_events

pytestmark = pytest.mark.e2e

PROMPT = "there is a house"
DEFAULT_MAX_TOKENS = 16
LONG = 100
"""So many tokens do not all wait for a server that is held up: a stream merges what waits."""
VLLM_INPUTS = {
    "text_input": "TYPE_STRING",
    "stream": "TYPE_BOOL",
    "sampling_parameters": "TYPE_STRING",
    "exclude_input_in_output": "TYPE_BOOL",
    "return_finish_reason": "TYPE_BOOL",
    "return_cumulative_logprob": "TYPE_BOOL",
    "return_logprobs": "TYPE_BOOL",
    "return_num_input_tokens": "TYPE_BOOL",
    "return_num_output_tokens": "TYPE_BOOL",
}
VLLM_OUTPUTS = {
    "text_output": ("TYPE_STRING", [-1]),
    "finish_reason": ("TYPE_STRING", [-1]),
    "cumulative_logprob": ("TYPE_FP32", [-1]),
    "logprobs": ("TYPE_STRING", [-1]),
    "num_input_tokens": ("TYPE_UINT32", [1]),
    "num_output_tokens": ("TYPE_UINT32", [-1]),
}
RETURNS = [name for name in VLLM_INPUTS if name.startswith("return_")]


@pytest.fixture(scope="module")
def reference(lab: Lab) -> str:
    """What follows the prompt, up to the first end-of-answer token there may be."""
    ids = lab.reference.ids(PROMPT, DEFAULT_MAX_TOKENS)
    assert not {0, 2} & set(ids), "the reference should not end early"
    return lab.reference.tokenizer.decode(ids)


def create_request(
    prompt: str,
    stream: bool,
    request_id: object,
    sampling_parameters: Mapping[str, object],
    model_name: str,
    send_parameters_as_tensor: bool = True,
    exclude_input_in_output: bool | None = None,
    returns: tuple[str, ...] = (),
) -> dict[str, object]:
    """Return the arguments of `stream_infer` that the backend's sample client would build.

    It sends the sampling parameters twice: as a tensor and as parameters of the request.
    """
    inputs = [grpc.InferInput("text_input", [1], "BYTES"), grpc.InferInput("stream", [1], "BOOL")]
    inputs[0].set_data_from_numpy(np.array([prompt.encode()], dtype=np.object_))
    inputs[1].set_data_from_numpy(np.array([stream], dtype=bool))
    if send_parameters_as_tensor:
        inputs.append(grpc.InferInput("sampling_parameters", [1], "BYTES"))
        text = json.dumps(sampling_parameters).encode()
        inputs[-1].set_data_from_numpy(np.array([text], dtype=np.object_))
    flags = dict.fromkeys(returns, True)
    if exclude_input_in_output is not None:
        flags["exclude_input_in_output"] = exclude_input_in_output
    for name, value in flags.items():
        inputs.append(grpc.InferInput(name, [1], "BOOL"))
        inputs[-1].set_data_from_numpy(np.array([value], dtype=bool))
    return {
        "model_name": model_name,
        "inputs": inputs,
        "outputs": [] if returns else [grpc.InferRequestedOutput("text_output")],
        "request_id": str(request_id),
        "parameters": sampling_parameters,
    }


def stream_infer(model: ServedModel, requests: list[dict]) -> dict[str, list]:
    """Send requests over one stream as the sample client does; returns the results by request id."""

    async def run() -> dict[str, list]:
        results = defaultdict(list)

        async def iterate() -> AsyncIterator[dict]:
            for request in requests:
                yield request

        async with grpc.InferenceServerClient(url=model.server.grpc) as client:
            async for result, error in client.stream_infer(inputs_iterator=iterate(), stream_timeout=30):
                assert error is None, error
                results[result.get_response().id].append(result)
        return results

    return asyncio.run(run())


def text_of(results: list) -> str:
    return "".join(piece.decode() for result in results for piece in result.as_numpy("text_output"))


# HTTP, as in the backend's README.


def test_first_inference_of_the_readme(tiny: ServedModel, reference: str) -> None:
    sent = json.dumps({"text_input": PROMPT, "parameters": {"stream": False, "temperature": 0}})
    status, reply = tiny.post("generate", sent.encode())
    assert status == 200
    assert json.loads(reply) == {
        "model_name": "tiny",
        "model_version": "1",
        "text_output": PROMPT + reference,
    }


def test_generate_stream(lab: Lab, tiny: ServedModel) -> None:
    parameters = {"stream": True, "temperature": 0, "max_tokens": LONG, "ignore_eos": True}
    sent = json.dumps({"text_input": PROMPT, "parameters": parameters})
    status, reply = tiny.post("generate_stream", sent.encode())
    events = parse_events(reply)
    assert status == 200
    assert len(events) > 1
    assert all(event.keys() == {"model_name", "model_version", "text_output"} for event in events)
    assert "".join(event["text_output"] for event in events) == lab.reference.text(PROMPT, LONG)


# gRPC, as in samples/client.py.


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_sample_client(lab: Lab, tiny: ServedModel, stream: bool, as_tensor: bool) -> None:
    sampling = {"temperature": "0", "top_p": "0.95", "max_tokens": "20"}
    prompts = ["the quick brown fox\n", "one two three four\n", "def main():\n"]
    requests = [
        create_request(prompt, stream, index, sampling, "tiny", as_tensor)
        for index, prompt in enumerate(prompts)
    ]
    results = stream_infer(tiny, requests)
    assert results.keys() == {"0", "1", "2"}
    for index, prompt in enumerate(prompts):
        ids = lab.reference.ids(prompt, 20)
        end = next((place for place, token in enumerate(ids) if token in (0, 2)), 20)
        expected = lab.reference.tokenizer.decode(ids[:end], skip_special_tokens=True)
        assert text_of(results[str(index)]) == ("" if stream else prompt) + expected
        assert stream or len(results[str(index)]) == 1


@pytest.mark.parametrize(("exclude", "echoes"), [(None, True), (False, True), (True, False)])
def test_exclude_input_in_output(
    tiny: ServedModel, reference: str, exclude: bool | None, echoes: bool
) -> None:
    sampling = {"temperature": "0", "top_p": "1"}
    request = create_request(PROMPT, False, 7, sampling, "tiny", exclude_input_in_output=exclude)
    (result,) = stream_infer(tiny, [request])["7"]
    assert result.as_numpy("text_output").tolist() == [((PROMPT if echoes else "") + reference).encode()]


@pytest.mark.parametrize("stream", [True, False])
def test_additional_outputs(lab: Lab, tiny: ServedModel, reference: str, stream: bool) -> None:
    sampling = {"temperature": "0", "top_p": "1", "logprobs": "2"}
    request = create_request(
        PROMPT, stream, 1, sampling, "tiny", exclude_input_in_output=True, returns=tuple(RETURNS)
    )
    results = stream_infer(tiny, [request])["1"]
    assert text_of(results) == reference
    outputs = [
        {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}
        for result in results
    ]
    assert all(output.keys() == VLLM_OUTPUTS.keys() for output in outputs)
    *before, last = outputs
    assert all(output["finish_reason"].tolist() == [b"None"] for output in before)
    assert last["finish_reason"].tolist() == [b"length"]
    num_prompt = len(lab.reference.tokenizer(PROMPT).input_ids)
    assert all(int(output["num_input_tokens"].item()) == num_prompt for output in outputs)
    assert sum(int(output["num_output_tokens"][0]) for output in outputs) == DEFAULT_MAX_TOKENS
    positions = [entry for output in outputs for entry in json.loads(output["logprobs"][0])]
    assert len(positions) == DEFAULT_MAX_TOKENS
    for token, position in zip(lab.reference.ids(PROMPT, DEFAULT_MAX_TOKENS), positions, strict=True):
        best = position[str(token)]
        assert best.keys() == {"logprob", "rank", "decoded_token"}
        assert best["rank"] == 1 and len(position) == 2
    chosen = sum(max(one["logprob"] for one in position.values()) for position in positions)
    assert last["cumulative_logprob"][0] == pytest.approx(chosen, abs=1e-3)
    sums = [float(output["cumulative_logprob"][0]) for output in outputs]
    assert sums == sorted(sums, reverse=True), "a running sum of logarithms"


def test_additional_outputs_are_off_by_default(tiny: ServedModel) -> None:
    request = create_request(PROMPT, True, 1, {"temperature": "0"}, "tiny")
    request["outputs"] = []
    for result in stream_infer(tiny, [request])["1"]:
        assert [output.name for output in result.get_response().outputs] == ["text_output"]


def test_callback_client_of_the_documents(tiny: ServedModel) -> None:
    """The example of additional_outputs.md: no `stream`, no parameters, one flag."""
    inputs = [sync_grpc.InferInput("text_input", [1], "BYTES")]
    inputs[-1].set_data_from_numpy(np.array([b"example prompt"], dtype=np.object_))
    inputs.append(sync_grpc.InferInput("return_finish_reason", [1], "BOOL"))
    inputs[-1].set_data_from_numpy(np.array([True], dtype=bool))
    came: list[tuple[sync_grpc.InferResult | None, InferenceServerException | None]] = []
    with sync_grpc.InferenceServerClient(tiny.server.grpc) as client:
        client.start_stream(lambda result, error: came.append((result, error)))
        client.async_stream_infer("tiny", inputs=inputs)
        client.stop_stream()
    ((result, error),) = came
    assert error is None
    assert result.as_numpy("finish_reason").tolist() in ([b"length"], [b"stop"])
    assert result.as_numpy("text_output")[0].startswith(b"example prompt")


def test_generate_with_tensors_at_the_top_level(lab: Lab, tiny: ServedModel, reference: str) -> None:
    """/generate takes known tensors beside text_input; flags that are tensors need not be parameters."""
    answer = tiny.generate(
        {
            "text_input": PROMPT,
            "stream": False,
            "sampling_parameters": json.dumps({"temperature": "0", "top_p": "1", "max_tokens": "16"}),
            "exclude_input_in_output": True,
            "return_finish_reason": True,
            "return_num_input_tokens": True,
            "return_num_output_tokens": True,
        }
    )
    assert (answer.error, answer.text, answer.finish_reason) == (None, reference, "length")
    assert answer.num_input == len(lab.reference.tokenizer(PROMPT).input_ids)
    assert answer.num_output == DEFAULT_MAX_TOKENS


# The model as clients see it.


def test_configuration_has_the_tensors_of_the_vllm_backend(tiny: ServedModel) -> None:
    with urllib.request.urlopen(f"{tiny.server.http}/v2/models/tiny/config") as answer:
        config = json.load(answer)
    inputs = {spec["name"]: spec for spec in config["input"]}
    assert {name: inputs[name]["data_type"] for name in VLLM_INPUTS} == VLLM_INPUTS
    assert all(inputs[name]["dims"] == [1] for name in VLLM_INPUTS)
    assert all(spec["optional"] for name, spec in inputs.items() if name != "text_input")
    outputs = {spec["name"]: (spec["data_type"], spec["dims"]) for spec in config["output"]}
    assert {name: outputs[name] for name in VLLM_OUTPUTS} == VLLM_OUTPUTS
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["max_batch_size"] == 0


def test_metadata_over_grpc(tiny: ServedModel) -> None:
    with sync_grpc.InferenceServerClient(tiny.server.grpc) as client:
        assert client.is_server_ready() and client.is_model_ready("tiny")
        metadata = client.get_model_metadata("tiny")
        assert client.get_model_config("tiny").config.backend == "conch"
    datatypes = {tensor.name: tensor.datatype for tensor in (*metadata.inputs, *metadata.outputs)}
    assert datatypes["text_input"] == datatypes["text_output"] == "BYTES"
    assert datatypes["stream"] == "BOOL" and datatypes["num_output_tokens"] == "UINT32"


def test_a_stream_in_pieces(lab: Lab) -> None:
    body = {"text_input": PROMPT, "parameters": {"temperature": 0, "max_tokens": 10, "ignore_eos": True}}
    with lab.loaded("pieces") as model:
        answer = model.stream({**body, "return_num_output_tokens": True})
    assert answer.text == lab.reference.text(PROMPT, 10)
    lab.wait_until_unloaded("pieces")  # other tests watch which processes the server has
    assert answer.num_output == 10
    assert len(answer.counts) <= 4, "more responses than 1 + 4 + 4 + 1 tokens take"
    assert all(count >= 4 for count in answer.counts[1:-1])
