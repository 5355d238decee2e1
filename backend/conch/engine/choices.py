"""Which engine request is which choice of which client request."""

from __future__ import annotations


class Choices:
    """Two-way book between client requests and the engine's requests, one for each choice."""

    def __init__(self) -> None:
        self._of_client: dict[int, dict[int, int]] = {}
        self._of_request: dict[int, tuple[int, int]] = {}

    def add(self, client_id: int, choice: int, request_id: int) -> None:
        """Note that a choice of a client request is served by an engine request."""
        self._of_client.setdefault(client_id, {})[choice] = request_id
        self._of_request[request_id] = (client_id, choice)

    def remove(self, request_id: int) -> None:
        """Forget an engine request."""
        client_id, choice = self._of_request.pop(request_id)
        live = self._of_client[client_id]
        del live[choice]
        if not live:
            del self._of_client[client_id]

    def whose(self, request_id: int) -> tuple[int, int]:
        """Client request and choice that an engine request serves."""
        return self._of_request[request_id]

    def requests(self, client_id: int) -> list[int]:
        """Engine requests of a client request that are alive."""
        return list(self._of_client.get(client_id, {}).values())
