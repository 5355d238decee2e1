"""The requests in flight between Triton and the engine."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from conch.api.steps import FinishReason, RequestOutput
from conch.host.choice import Choice, ChoiceFactory
from conch.host.inputs import Wants
from conch.host.sender import GuardedSender
from conch.host.session import Session


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request from its admission to its last response. Only the responder's thread writes it.

    Attributes
    ----------
    id
        Chosen here and never used twice; the client's own id stays with Triton.
    sender
        Where its responses go. Kept nowhere else, because a model that is still referred to cannot unload.
    session
        The engine process that serves it; None while it waits for one to come back.
    echo
        What its text begins with.
    factory
        Makes its choices, again when another engine takes it over.
    """

    id: int
    sender: GuardedSender
    session: Session | None
    stream: bool
    wants: Wants
    num_prompt: int
    echo: str
    with_logprobs: bool
    factory: ChoiceFactory
    choices: tuple[Choice, ...]
    arrival_s: float = field(default_factory=time.monotonic)

    def begin_again(self) -> None:
        """Forget what its engine, which is gone, has brought."""
        self.session = None
        self.choices = tuple(self.factory.make() for _ in self.choices)

    def take(self, output: RequestOutput) -> bool:
        """Take news of one choice; returns whether a stop string ended that choice just now."""
        choice = self.choices[output.choice]
        ended_before = choice.finish_reason is not None
        choice.take(output)
        return choice.has_matched_stop and not ended_before and output.finish_reason is None

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended, and all that its last response tells is known."""
        return all(
            choice.finish_reason is not None and (choice.usage is not None or not self.wants.timings)
            for choice in self.choices
        )

    @property
    def was_cancelled(self) -> bool:
        """Whether the engine gave a choice up that nobody here asked it to."""
        return any(choice.finish_reason is FinishReason.CANCELLED for choice in self.choices)

    def is_due(self, interval: int) -> bool:
        """Whether a streaming client should get a response now, other than the last one.

        Parameters
        ----------
        interval
            Tokens that a choice must have since the last response, unless they are its first or its last.
        """
        wants = self.wants
        if all(choice.finish_reason is not None for choice in self.choices):
            return False  # the end is told once, with all that belongs to it
        return any(
            choice.is_due(interval)
            and (any(choice.text) or (choice.token_ids and (wants.output_ids or wants.logprobs)))
            for choice in self.choices
        )

    @property
    def unconfirmed(self) -> int:
        """Choices whose end the engine has not told yet."""
        return sum(choice.usage is None for choice in self.choices)


class LiveTable:
    """The live requests by id. The responder's thread writes; the cancellation watcher reads."""

    def __init__(self) -> None:
        self._requests: dict[int, LiveRequest] = {}
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: LiveRequest) -> None:
        """Let a request in."""
        with self._changed:
            self._requests[request.id] = request
            self._changed.notify_all()

    def get(self, request_id: int) -> LiveRequest | None:
        """Return a request, or None once it has ended."""
        return self._requests.get(request_id)

    def pop(self, request_id: int) -> LiveRequest | None:
        """Take a request out: whoever gets it sends its last response."""
        with self._changed:
            return self._requests.pop(request_id, None)

    def ids(self) -> list[int]:
        """Return the ids of the live requests, oldest first."""
        with self._changed:
            return list(self._requests)

    def wait_for_any(self) -> bool:
        """Sleep until there is a request; False once the table is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._requests or self._closed)
            return not self._closed

    def close(self) -> None:
        """Wake who waits for a request in vain."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
