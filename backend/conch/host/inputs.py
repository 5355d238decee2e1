"""A Triton request's tensors and parameters, read into one typed value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from conch.api.errors import RequestError
from conch.api.sampling import SamplingParams
from conch.host import coercion, strict_json
from conch.host.pb import InferenceRequest
from conch.host.sampling_input import parse_sampling

PRIORITY_LIMIT = 1 << 31
MICROSECONDS = 1_000_000
_SALT_BYTES = 1024
_NOT_SAMPLING = ("id", "timeout", "priority", "tenant", "ttft_target_s", "tpot_target_s")
_INTERNAL_PREFIX = "triton_"


@dataclass(frozen=True, slots=True)
class Wants:
    """Which additional outputs a request asks for; each has the name of its input without ``return_``."""

    finish_reason: bool
    cumulative_logprob: bool
    logprobs: bool
    num_input_tokens: bool
    num_output_tokens: bool
    output_ids: bool
    timings: bool


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a client asks for, before it is turned into tokens.

    Attributes
    ----------
    text, token_ids, messages
        The prompt: exactly one is set.
    stream
        Whether responses are deltas; otherwise there is one response.
    echo
        Whether the one response begins with the prompt.
    timeout_s
        Bound on its whole life; None for none.
    tenant
        On whose account it is; None where it does not say.
    ttft_target_s, tpot_target_s
        Wishes for the first token and for each further one; None where it does not say.
    """

    text: str | None
    token_ids: npt.NDArray[Any] | None
    messages: list[Any] | None
    stream: bool
    echo: bool
    wants: Wants
    params: SamplingParams
    cache_salt: str
    priority: int
    timeout_s: float | None
    tenant: str | None
    ttft_target_s: float | None
    tpot_target_s: float | None

    @property
    def engine_params(self) -> SamplingParams:
        """What the engine is told: the client's parameters, and log-probabilities where a sum needs them."""
        if self.wants.cumulative_logprob and self.params.logprobs is None:
            return msgspec.structs.replace(self.params, logprobs=0)
        return self.params


def read_inputs(request: InferenceRequest) -> Inputs:
    """Read and validate one request.

    Raises
    ------
    RequestError
        An input is missing, of a wrong type or shape, or out of range.
    """
    tensors = _Tensors(request)
    parameters = strict_json.decode_object(request.parameters() or "{}", "request parameters")
    text, messages = tensors.text("text_input"), tensors.text("messages")
    token_ids = tensors.integers("input_ids")
    given = [
        name
        for name, value in (("text_input", text), ("input_ids", token_ids), ("messages", messages))
        if value is not None
    ]
    if len(given) != 1:
        said = "none is" if not given else f"{' and '.join(given)} are"
        raise RequestError(f"exactly one of text_input, input_ids and messages must be given; {said}")
    stream = tensors.flag("stream") or False
    wants = _read_wants(tensors)
    return Inputs(
        text=text,
        token_ids=token_ids,
        messages=None if messages is None else _decode_messages(messages),
        stream=stream,
        echo=_read_echo(tensors.flag("exclude_input_in_output"), stream, text is not None),
        wants=wants,
        params=_read_sampling(tensors.text("sampling_parameters"), parameters),
        cache_salt=_bounded("cache_salt", tensors.text("cache_salt")) or "",
        priority=_read_priority(tensors.integers("priority"), parameters.get("priority")),
        timeout_s=_read_timeout(request.timeout(), parameters.get("timeout")),
        tenant=_read_tenant(tensors.text("tenant"), parameters.get("tenant")),
        ttft_target_s=_read_target("ttft_target_s", tensors, parameters),
        tpot_target_s=_read_target("tpot_target_s", tensors, parameters),
    )


class _Tensors:
    """The tensors of a request by name."""

    def __init__(self, request: InferenceRequest) -> None:
        self._tensors = {tensor.name(): tensor for tensor in request.inputs()}

    def text(self, name: str) -> str | None:
        array = self._single(name, np.object_, "one string")
        if array is None:
            return None
        value = array.item()
        return value if isinstance(value, str) else strict_json.decode_utf8(value, name)

    def flag(self, name: str) -> bool | None:
        array = self._single(name, np.bool_, "one boolean")
        return None if array is None else bool(array.item())

    def integers(self, name: str) -> npt.NDArray[Any] | None:
        array = self._array(name)
        if array is not None and not np.issubdtype(array.dtype, np.integer):
            raise RequestError(f"must hold integers, not {array.dtype}", field=name)
        return None if array is None else array.reshape(-1).copy()

    def number(self, name: str) -> float | None:
        array = self._single(name, np.float32, "one 32-bit float")
        return None if array is None else coercion.to_float(name, array.item())

    def _single(self, name: str, dtype: type[np.generic], wanted: str) -> npt.NDArray[Any] | None:
        array = self._array(name)
        if array is None:
            return None
        if array.dtype != dtype or array.size != 1:
            raise RequestError(
                f"must be {wanted}, not {array.dtype} of shape {list(array.shape)}", field=name
            )
        return array

    def _array(self, name: str) -> npt.NDArray[Any] | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor.as_numpy()


def _read_wants(tensors: _Tensors) -> Wants:
    return Wants(**{name: tensors.flag(f"return_{name}") or False for name in Wants.__slots__})


def _read_echo(exclude: bool | None, stream: bool, is_text: bool) -> bool:
    """Whether to echo: by default as Triton's vLLM backend does, a text prompt without streaming."""
    if exclude is None:
        return is_text and not stream
    if not exclude and stream:
        raise RequestError("must not be false when streaming", field="exclude_input_in_output")
    return not exclude


def _read_sampling(text: str | None, parameters: Mapping[str, Any]) -> SamplingParams:
    tensor = {} if text is None else strict_json.decode_object(text, "sampling_parameters")
    others = {
        key: value
        for key, value in parameters.items()
        if key not in _NOT_SAMPLING and not key.startswith(_INTERNAL_PREFIX)
    }
    return parse_sampling(tensor, others)


def _decode_messages(text: str) -> list[Any]:
    messages = strict_json.decode(text, "messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("must be a JSON list of at least one message", field="messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError("each must be a JSON object with a role", field="messages")
    return messages


def _bounded(field: str, text: str | None) -> str | None:
    if text is not None and len(text.encode()) > _SALT_BYTES:
        raise RequestError(f"must be at most {_SALT_BYTES} bytes", field=field)
    return text


def _read_priority(tensor: npt.NDArray[Any] | None, parameter: object) -> int:
    """Read the tensor, or the parameter that ``/generate`` bodies carry."""
    if tensor is not None and tensor.size != 1:
        raise RequestError(f"must be one integer, not {tensor.size}", field="priority")
    said = {int(tensor.item())} if tensor is not None else set()
    if parameter is not None:
        said.add(coercion.to_int("priority", parameter))
    if len(said) > 1:
        raise RequestError("is given twice, with different values", field="priority")
    priority = said.pop() if said else 0
    if not 0 <= priority < PRIORITY_LIMIT:
        raise RequestError(f"must be in [0, {PRIORITY_LIMIT - 1}], not {priority}", field="priority")
    return priority


def _read_tenant(tensor: str | None, parameter: object) -> str | None:
    if parameter is not None and not isinstance(parameter, str):
        raise RequestError(f"must be a string, not {type(parameter).__name__}", field="tenant")
    if tensor is not None and parameter is not None and tensor != parameter:
        raise RequestError("is given twice, with different values", field="tenant")
    return _bounded("tenant", parameter if tensor is None else tensor)


def _read_target(field: str, tensors: _Tensors, parameters: Mapping[str, Any]) -> float | None:
    said = {number} if (number := tensors.number(field)) is not None else set()
    if (parameter := parameters.get(field)) is not None:
        said.add(coercion.to_float(field, parameter))
    if len(said) > 1:
        raise RequestError("is given twice, with different values", field=field)
    target = said.pop() if said else None
    if target is not None and target <= 0:
        raise RequestError(f"must be seconds, more than 0, not {target}", field=field)
    return target


def _read_timeout(timeout_us: int, parameter: object) -> float | None:
    """Read Triton's own timeout, or the parameter that ``/generate`` bodies carry; the shorter rules."""
    said = [timeout_us] if timeout_us > 0 else []
    if parameter is not None:
        wanted = coercion.to_int("timeout", parameter)
        if wanted < 0:
            raise RequestError(f"must be microseconds, 0 for none, not {wanted}", field="timeout")
        said += [wanted] if wanted else []
    return min(said) / MICROSECONDS if said else None
