"""What a running server says of itself over HTTP."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any

_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class ModelState:
    """One model as the repository index lists it; `reason` is empty unless loading it failed."""

    name: str
    state: str
    reason: str

    @property
    def is_ready(self) -> bool:
        """Whether the model serves."""
        return self.state == "READY"

    @property
    def has_failed(self) -> bool:
        """Whether the model was loaded without success, as opposed to not loaded or unloaded."""
        return self.state == "UNAVAILABLE" and self.reason not in ("", "unloaded")


class HealthClient:
    """Asks one server about its state; an answer that does not come is no state.

    Parameters
    ----------
    endpoint
        ``host:port`` of Triton's HTTP protocol.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def is_live(self) -> bool:
        """Whether the server answers; it does so only after the models that it starts with were tried."""
        return self._ask("GET", "/v2/health/live") is not None

    def models(self) -> list[ModelState]:
        """Return the models in the server's repositories."""
        body = self._ask("POST", "/v2/repository/index")
        entries: list[dict[str, Any]] = json.loads(body) if body else []
        return [ModelState(e["name"], e.get("state", ""), e.get("reason", "").strip()) for e in entries]

    def _ask(self, method: str, path: str) -> bytes | None:
        connection = http.client.HTTPConnection(self._endpoint, timeout=_TIMEOUT_S)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return body if answer.status < 400 else None
