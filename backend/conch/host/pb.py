"""The part of Triton's Python backend that conch uses; the real module comes in through `conch.host.model`.

Everything else takes it as an argument, so that tests bring their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

PbUtils = Any
"""The module `triton_python_backend_utils`, and what it is made of: it has no types."""

FINAL = 1
"""The flag of a request's last response (``TRITONSERVER_RESPONSE_COMPLETE_FINAL``)."""


class Tensor(Protocol):
    """An input of a request."""

    def name(self) -> str:
        """Return its name."""

    def as_numpy(self) -> npt.NDArray[Any]:
        """Return its values, which may live in memory that ends with the request."""


class ResponseSender(Protocol):
    """Where the responses of one request go. Keeping it keeps the model from unloading."""

    def send(self, response: object = None, flags: int = 0) -> None:
        """Send a response; FINAL ends the request."""

    def is_cancelled(self) -> bool:
        """Whether the client is gone; asks the server, which takes 0.1 to 2 ms."""


class InferenceRequest(Protocol):
    """One request as Triton hands it over."""

    def inputs(self) -> Sequence[Tensor]:
        """Return the inputs that the client sent."""

    def parameters(self) -> str:
        """Return the request parameters as a JSON object."""

    def timeout(self) -> int:
        """Return the client's timeout in microseconds, 0 for none."""

    def get_response_sender(self) -> ResponseSender:
        """Return where its responses go."""


def bytes_array(items: Sequence[bytes]) -> npt.NDArray[np.object_]:
    """Return a BYTES tensor's values, shape ``[len(items)]``."""
    array = np.empty(len(items), dtype=np.object_)
    array[:] = items
    return array
