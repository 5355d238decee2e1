"""Errors that cross a boundary: each says what was wrong and what would be right."""

from __future__ import annotations

from enum import Enum


class ErrorCode(str, Enum):
    """Why a request failed, in the terms that Triton reports to its clients."""

    INVALID_ARGUMENT = "invalid_argument"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


class ConchError(Exception):
    """Base of every error that conch raises on purpose."""


class ConfigError(ConchError):
    """A setting of the engine is unknown, ill-typed, out of range or contradicts another."""


class PluginError(ConchError):
    """A plugin could not be loaded, clashes with another, or could not build what it offers."""


class CheckpointError(ConchError):
    """A checkpoint is missing, incomplete, or of a kind that cannot be served."""


class RequestError(ConchError):
    """One request cannot be served. Its neighbours and the engine are unharmed.

    Parameters
    ----------
    message
        What was wrong, naming the limit.
    code
        The class of the failure.
    field
        The input that was wrong, or None where no single input is to blame.
    """

    def __init__(
        self, message: str, code: ErrorCode = ErrorCode.INVALID_ARGUMENT, field: str | None = None
    ) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.code = code
        self.field = field
