"""Which engine request is which choice of which client request."""

from __future__ import annotations

from collections.abc import Iterable


class Choices:
    """Two-way book between client requests and the engine's requests, one for each choice."""

    def __init__(self) -> None:
        self._of_client: dict[int, dict[int, int]] = {}
        self._of_request: dict[int, tuple[int, int]] = {}

    def add(self, client_id: int, choice: int, request_id: int) -> None:
        """Note that a choice of a client request is served by an engine request."""
        self._of_client.setdefault(client_id, {})[choice] = request_id
        self._of_request[request_id] = (client_id, choice)

    def remove(self, request_id: int) -> tuple[int, int]:
        """Forget an engine request; returns its client request and choice."""
        client_id, choice = self._of_request.pop(request_id)
        live = self._of_client[client_id]
        del live[choice]
        if not live:
            del self._of_client[client_id]
        return client_id, choice

    def whose(self, request_id: int) -> tuple[int, int]:
        """Client request and choice that an engine request serves."""
        return self._of_request[request_id]

    def live(self, client_id: int) -> dict[int, int]:
        """Choice to engine request, for those of a client request that are alive; a copy."""
        return dict(self._of_client.get(client_id, {}))

    def requests(self, client_id: int, choices: Iterable[int]) -> list[int]:
        """Engine requests of the named choices (all when none is named) that are alive."""
        live = self.live(client_id)
        wanted = tuple(choices)
        return [request for choice, request in live.items() if not wanted or choice in wanted]
