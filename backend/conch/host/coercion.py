"""One client value to one typed value: numbers may come as strings, lists as serialized JSON.

What cannot be read without guessing is refused with the field's name; nothing is silently replaced.
"""

from __future__ import annotations

import math
import re
from typing import Any

from conch.api.errors import RequestError
from conch.host import strict_json

_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_MOST_DIGITS = 64
_TRUE = ("true", "1")
_FALSE = ("false", "0")


def to_int(field: str, value: object) -> int:
    """Read an integer: 64, 64.0 or "64"."""
    number = value
    if isinstance(value, str):
        text = value.strip()
        number = int(text) if _INTEGER.fullmatch(text) else _parse_float(text)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int):
        raise _wrong(field, "an integer", value)
    return number


def to_float(field: str, value: object) -> float:
    """Read a finite number: 0.5, 1 or "0.5"."""
    number = _parse_float(value.strip()) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise _wrong(field, "a number", value)
    try:
        number = float(number)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _wrong(field, "a finite number", value)
    return number


def to_bool(field: str, value: object) -> bool:
    """Read a boolean: true, "true" or 1."""
    if isinstance(value, bool):
        return value
    text = value.strip().lower() if isinstance(value, str) else None
    if text in _TRUE or (isinstance(value, (int, float)) and value == 1):
        return True
    if text in _FALSE or (isinstance(value, (int, float)) and value == 0):
        return False
    raise _wrong(field, "true or false", value)


def to_strings(field: str, value: object) -> tuple[str, ...]:
    """Read one string, a list of strings, or such a list as serialized JSON."""
    items: object = _deserialized_list(field, value)
    if items is None:
        items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise _wrong(field, "a string or a list of strings", value)
    for item in items:
        try:
            item.encode("utf-8")
        except UnicodeEncodeError:
            raise RequestError("holds half a surrogate pair, which is not text", field=field) from None
    return tuple(items)


def to_ints(field: str, value: object) -> tuple[int, ...]:
    """Read a list of integers, or one as serialized JSON."""
    items: object = _deserialized_list(field, value)
    if items is None:
        items = value
    if not isinstance(items, list):
        raise _wrong(field, "a list of integers", value)
    return tuple(to_int(field, item) for item in items)


def to_bias(field: str, value: object) -> dict[int, float]:
    """Read an object of token id to number, or one as serialized JSON."""
    members = value
    if isinstance(value, str):
        members = strict_json.decode(value, field)
    if not isinstance(members, dict):
        raise _wrong(field, "an object of token id to number", value)
    bias = {to_int(field, key): to_float(field, number) for key, number in members.items()}
    if len(bias) != len(members):
        raise RequestError("names a token id twice", field=field)
    return bias


def _deserialized_list(field: str, value: object) -> list[Any] | None:
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return None
    try:
        items = strict_json.decode(value, field)
    except RequestError:
        return None  # a stop string may begin with a bracket
    return items if isinstance(items, list) else None


def _parse_float(text: str) -> float | None:
    try:
        return float(text) if len(text) <= _MOST_DIGITS and "_" not in text else None
    except ValueError:
        return None


def _wrong(field: str, wanted: str, value: object) -> RequestError:
    shown = repr(value)
    return RequestError(
        f"must be {wanted}, not {shown if len(shown) <= 60 else shown[:57] + '...'}", field=field
    )
