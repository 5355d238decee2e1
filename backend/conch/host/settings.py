"""Settings that reach the stub through its environment, since Triton passes no arguments on."""

from __future__ import annotations

import json
import os
from typing import Any

from conch.api.errors import ConfigError

SETTINGS_VARIABLE = "CONCH_SET"
"""A JSON object of `model.json` keys that overrides the file, for every conch model of the server."""

SUPERVISED_VARIABLE = "CONCH_SUPERVISED"
"""Set where a supervisor starts the server again when a stub ends."""


def is_supervised() -> bool:
    """Whether a supervisor looks after this server."""
    return bool(os.environ.get(SUPERVISED_VARIABLE))


def settings_from_environment() -> dict[str, Any]:
    """Return what ``conch serve --set key=value`` has put there.

    Raises
    ------
    ConfigError
        It is not a JSON object.
    """
    text = os.environ.get(SETTINGS_VARIABLE) or "{}"
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{SETTINGS_VARIABLE} is not valid JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{SETTINGS_VARIABLE} must be a JSON object, not {text}")
    return settings
