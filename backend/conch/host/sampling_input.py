"""Sampling parameters from the wire: coerced, merged, and every key accounted for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from conch.api.errors import RequestError
from conch.api.sampling import SamplingParams
from conch.host import coercion

MOST_TOKENS = (1 << 31) - 1
"""Larger bounds mean the same: the context ends the output long before."""


def _to_count(field: str, value: object) -> int:
    return min(coercion.to_int(field, value), MOST_TOKENS)


def _to_logprobs(field: str, value: object) -> int | None:
    """Read a count; OpenAI's chat requests say false for none."""
    return None if value is False else coercion.to_int(field, value)


_COERCE: dict[str, Callable[[str, Any], Any]] = {
    "n": coercion.to_int,
    "temperature": coercion.to_float,
    "top_k": _to_count,
    "top_p": coercion.to_float,
    "min_p": coercion.to_float,
    "repetition_penalty": coercion.to_float,
    "presence_penalty": coercion.to_float,
    "frequency_penalty": coercion.to_float,
    "seed": coercion.to_int,
    "stop": coercion.to_strings,
    "stop_token_ids": coercion.to_ints,
    "include_stop_str_in_output": coercion.to_bool,
    "ignore_eos": coercion.to_bool,
    "min_tokens": _to_count,
    "max_tokens": _to_count,
    "logprobs": _to_logprobs,
    "logit_bias": coercion.to_bias,
    "skip_special_tokens": coercion.to_bool,
    "num_speculative_tokens": _to_count,
}
assert set(_COERCE) == {field.name for field in msgspec.structs.fields(SamplingParams)}

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "prompt_logprobs": (),
    "top_logprobs": (0,),
    "guided_decoding": (),
    "structured_outputs": (),
    "logits_processors": ([],),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "extra_args": ({},),
    "lora_name": (),
}
"""Keys that vLLM knows and conch does not serve, each with the values that ask for nothing (besides null)."""


def parse_sampling(*sources: Mapping[str, Any]) -> SamplingParams:
    """Build the sampling parameters that one or more sets of key and value ask for.

    null means the default. The same key in two sources must have the same value.

    Raises
    ------
    RequestError
        A key is unknown, unsupported, of a wrong type or out of range, or two sources disagree on it.
    """
    values: dict[str, Any] = {}
    for source in sources:
        for key, raw in source.items():
            if key in _NEUTRAL:
                _refuse_unless_neutral(key, raw)
            elif key not in _COERCE:
                raise _unknown(key)
            elif raw is not None:
                value = _COERCE[key](key, raw)
                if values.setdefault(key, value) != value:
                    raise RequestError(f"is {values[key]!r} in one place and {value!r} in another", field=key)
    return SamplingParams(**values)


def _refuse_unless_neutral(key: str, value: object) -> None:
    if value is not None and not any(value == neutral for neutral in _NEUTRAL[key]):
        raise RequestError("is not supported", field=key)


def _unknown(key: str) -> RequestError:
    near = difflib.get_close_matches(key, _COERCE, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(_COERCE)}"
    return RequestError(
        f"unknown sampling parameter; {hint}", field=key if len(key) <= 60 else key[:57] + "..."
    )
