"""JSON from clients, read strictly: what two parsers could read differently is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from conch.api.errors import RequestError

JsonValue = Any
"""What a JSON text may hold."""


def decode_utf8(raw: bytes, field: str) -> str:
    """Return the text of UTF-8 bytes.

    Raises
    ------
    RequestError
        They are not UTF-8.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"is not valid UTF-8: {error.reason} at byte {error.start}", field=field) from None


def decode(text: str, field: str) -> JsonValue:
    """Return the value of a JSON text. NaN and infinities are let through for the caller to name.

    Raises
    ------
    RequestError
        It is not JSON, repeats a key, holds half a surrogate pair, or is nested too deeply.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique)
        if "\\u" in text:
            _refuse_lone_surrogates(value)
    except RecursionError:
        raise RequestError("is nested too deeply", field=field) from None
    except UnicodeEncodeError:
        raise RequestError("holds half a surrogate pair, which is not text", field=field) from None
    except _RepeatedKeyError as error:
        raise RequestError(f"repeats the key {error.key!r}", field=field) from None
    except ValueError as error:
        raise RequestError(f"is not valid JSON: {error}", field=field) from None
    return value


def decode_object(text: str, field: str) -> Mapping[str, Any]:
    """Return the members of a JSON object; like `decode`, and refuses anything else."""
    value = decode(text, field)
    if not isinstance(value, dict):
        raise RequestError(f"must be a JSON object, not {kind_of(value)}", field=field)
    return value


def kind_of(value: object) -> str:
    """Name a JSON value's type for an error message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, (list, tuple)) else "an object"


class _RepeatedKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RepeatedKeyError(key)
            seen.add(key)
    return members


def _refuse_lone_surrogates(value: object) -> None:
    if isinstance(value, str):
        value.encode("utf-8")
    elif isinstance(value, list):
        for item in value:
            _refuse_lone_surrogates(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            key.encode("utf-8")
            _refuse_lone_surrogates(item)
