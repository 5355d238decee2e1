"""The tensors of a conch model: those of Triton's vLLM backend, and ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from conch.api.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, data type and dimensions of one tensor, as config.pbtxt spells them.

    Attributes
    ----------
    also
        Further data types that a config.pbtxt may declare instead.
    """

    name: str
    data_type: str
    dims: tuple[int, ...]
    also: tuple[str, ...] = ()


_ONE = (1,)
_ANY = (-1,)

INPUTS = (
    TensorSpec("text_input", "TYPE_STRING", _ONE),
    TensorSpec("stream", "TYPE_BOOL", _ONE),
    TensorSpec("sampling_parameters", "TYPE_STRING", _ONE),
    TensorSpec("exclude_input_in_output", "TYPE_BOOL", _ONE),
    TensorSpec("return_finish_reason", "TYPE_BOOL", _ONE),
    TensorSpec("return_cumulative_logprob", "TYPE_BOOL", _ONE),
    TensorSpec("return_logprobs", "TYPE_BOOL", _ONE),
    TensorSpec("return_num_input_tokens", "TYPE_BOOL", _ONE),
    TensorSpec("return_num_output_tokens", "TYPE_BOOL", _ONE),
    TensorSpec("input_ids", "TYPE_INT64", _ANY, also=("TYPE_INT32",)),
    TensorSpec("messages", "TYPE_STRING", _ONE),
    TensorSpec("return_output_ids", "TYPE_BOOL", _ONE),
    TensorSpec("return_timings", "TYPE_BOOL", _ONE),
    TensorSpec("cache_salt", "TYPE_STRING", _ONE),
    TensorSpec("priority", "TYPE_INT32", _ONE),
    TensorSpec("tenant", "TYPE_STRING", _ONE),
    TensorSpec("ttft_target_s", "TYPE_FP32", _ONE),
    TensorSpec("tpot_target_s", "TYPE_FP32", _ONE),
)
"""All optional: a prompt comes as one of `text_input`, `input_ids` and `messages`."""

OUTPUTS = (
    TensorSpec("text_output", "TYPE_STRING", _ANY),
    TensorSpec("finish_reason", "TYPE_STRING", _ANY),
    TensorSpec("cumulative_logprob", "TYPE_FP32", _ANY),
    TensorSpec("logprobs", "TYPE_STRING", _ANY),
    TensorSpec("num_input_tokens", "TYPE_UINT32", _ONE),
    TensorSpec("num_output_tokens", "TYPE_UINT32", _ANY),
    TensorSpec("output_ids", "TYPE_INT32", _ANY),
    TensorSpec("timings", "TYPE_STRING", _ONE),
)


class ModelConfig(Protocol):
    """The part of Triton's auto-complete object that is used here."""

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration so far."""

    def add_input(self, input: dict[str, Any], /) -> None:
        """Declare an input."""

    def add_output(self, output: dict[str, Any], /) -> None:
        """Declare an output."""

    def set_max_batch_size(self, max_batch_size: int, /) -> None:
        """Set the batch size that Triton may build."""

    def set_model_transaction_policy(self, policy: dict[str, Any], /) -> None:
        """Set whether a request may have any number of responses."""


def complete(config: ModelConfig) -> None:
    """Add what a config.pbtxt leaves out: tensors, decoupled responses, no batching by Triton.

    Raises
    ------
    ConfigError
        The config.pbtxt says otherwise, or names a tensor that conch does not have.
    """
    said = config.as_dict()
    if said.get("max_batch_size", 0):
        raise ConfigError(
            f"max_batch_size must be 0 (the engine batches by itself), not {said['max_batch_size']}"
        )
    if said.get("model_transaction_policy", {}).get("decoupled") is False:
        raise ConfigError("model_transaction_policy must be decoupled: a stream has many responses")
    for scheduler in ("dynamic_batching", "sequence_batching"):
        if scheduler in said:
            raise ConfigError(f"{scheduler} must not be set: the engine batches by itself")
    for spec in _missing("input", said, INPUTS):
        config.add_input(
            {"name": spec.name, "data_type": spec.data_type, "dims": list(spec.dims), "optional": True}
        )
    for spec in _missing("output", said, OUTPUTS):
        config.add_output({"name": spec.name, "data_type": spec.data_type, "dims": list(spec.dims)})
    config.set_model_transaction_policy({"decoupled": True})
    config.set_max_batch_size(0)


def _missing(kind: str, said: dict[str, Any], specs: tuple[TensorSpec, ...]) -> list[TensorSpec]:
    """Return the tensors to add, after checking those that the config declares itself."""
    known = {spec.name: spec for spec in specs}
    declared = {tensor["name"]: tensor for tensor in said.get(kind, [])}
    for name, tensor in declared.items():
        spec = known.get(name)
        if spec is None:
            raise ConfigError(f"conch has no {kind} {name!r}; it has {', '.join(known)}")
        allowed = (spec.data_type, *spec.also)
        if tensor["data_type"] not in allowed:
            raise ConfigError(f"{kind} {name!r} must be {' or '.join(allowed)}, not {tensor['data_type']}")
        if [int(dim) for dim in tensor["dims"]] != list(spec.dims):
            raise ConfigError(f"{kind} {name!r} must have dims {list(spec.dims)}, not {tensor['dims']}")
        if kind == "input" and name != "text_input" and not tensor.get("optional"):
            raise ConfigError(f"input {name!r} must be optional")
    return [spec for spec in specs if spec.name not in declared]
