"""Output tensors and errors, in the shapes of Triton's vLLM backend.

Every output but `num_input_tokens` and `timings` has one entry for each choice. In a stream the entries are
what is new; for a choice without news that is nothing, and its `finish_reason` is ``None`` while it goes on.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from conch.api.errors import ErrorCode, RequestError
from conch.host.choice import Choice
from conch.host.codec import TextCodec
from conch.host.live import LiveRequest
from conch.host.pb import PbUtils, bytes_array
from conch.host.sender import GuardedSender

_TRITON_CODES = {
    ErrorCode.INVALID_ARGUMENT: "INVALID_ARG",
    ErrorCode.UNAVAILABLE: "UNAVAILABLE",
    ErrorCode.TIMEOUT: "UNAVAILABLE",  # Triton has no code of its own for it
    ErrorCode.CANCELLED: "CANCELLED",
    ErrorCode.INTERNAL: "INTERNAL",
}


class ResponseWriter:
    """Builds responses and sends them."""

    def __init__(self, pb_utils: PbUtils, codec: TextCodec) -> None:
        self._pb = pb_utils
        self._codec = codec

    def send(self, request: LiveRequest, *, final: bool) -> None:
        """Send what is new of all choices, and forget it."""
        arrays = self._arrays(request, final)
        tensors = [self._pb.Tensor(name, array) for name, array in arrays.items()]
        for choice in request.choices:
            choice.clear()
        request.echo = ""
        request.sender.send(self._pb.InferenceResponse(output_tensors=tensors), final=final)

    def _arrays(self, request: LiveRequest, final: bool) -> dict[str, npt.NDArray[Any]]:
        choices, wants = request.choices, request.wants
        texts = [(request.echo + "".join(choice.text)).encode() for choice in choices]
        arrays: dict[str, npt.NDArray[Any]] = {"text_output": bytes_array(texts)}
        if wants.finish_reason:
            arrays["finish_reason"] = bytes_array([_reason(choice) for choice in choices])
        if wants.cumulative_logprob:
            sums = [choice.cumulative_logprob for choice in choices]
            arrays["cumulative_logprob"] = np.array(sums, dtype=np.float32)
        if wants.logprobs:
            arrays["logprobs"] = bytes_array([self._logprobs(request, choice) for choice in choices])
        if wants.num_input_tokens:
            arrays["num_input_tokens"] = np.array([request.num_prompt], dtype=np.uint32)
        if wants.num_output_tokens or (wants.output_ids and len(choices) > 1):
            counts = [len(choice.token_ids) for choice in choices]
            arrays["num_output_tokens"] = np.array(counts, dtype=np.uint32)
        if wants.output_ids:
            ids = [token_id for choice in choices for token_id in choice.token_ids]
            arrays["output_ids"] = np.array(ids, dtype=np.int32)
        if wants.timings and final:
            arrays["timings"] = bytes_array([_timings(choices)])
        return arrays

    def _logprobs(self, request: LiveRequest, choice: Choice) -> bytes:
        if not request.with_logprobs:
            return b"null"
        positions = []
        for position in choice.logprobs:
            ranked = {token_id: (value, rank) for rank, (token_id, value) in enumerate(position.top, start=1)}
            entries = {position.token_id: (position.logprob, position.rank), **ranked}
            positions.append(
                {
                    str(token_id): {
                        "logprob": value,
                        "rank": rank,
                        "decoded_token": self._codec.token_text(token_id),
                    }
                    for token_id, (value, rank) in entries.items()
                }
            )
        return json.dumps(positions).encode()


def send_error(pb_utils: PbUtils, sender: GuardedSender, error: RequestError) -> None:
    """Send an error as the last response."""
    code = getattr(pb_utils.TritonError, _TRITON_CODES[error.code])
    response = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))
    sender.send(response, final=True)


def _reason(choice: Choice) -> bytes:
    return b"None" if choice.finish_reason is None else choice.finish_reason.value.encode()


def _timings(choices: tuple[Choice, ...]) -> bytes:
    """Sum up what the engine measured of all choices: the first token of any, the end of the last."""
    usages = [choice.usage for choice in choices if choice.usage is not None]
    first_tokens = [usage.ttft_s for usage in usages if usage.ttft_s is not None]
    return json.dumps(
        {
            "queue_s": min(usage.queue_s for usage in usages),
            "ttft_s": min(first_tokens, default=None),
            "total_s": max(usage.total_s for usage in usages),
            "num_cached_tokens": max(usage.num_cached for usage in usages),
            "num_preemptions": sum(usage.num_preemptions for usage in usages),
            "num_draft_tokens": sum(usage.num_draft_tokens for usage in usages),
            "num_accepted_tokens": sum(usage.num_accepted_tokens for usage in usages),
        }
    ).encode()
