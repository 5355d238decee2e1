"""What can happen to live requests, in the words of the responder's queue."""

from __future__ import annotations

from dataclasses import dataclass

from conch.api.errors import RequestError
from conch.engine.protocol import AddRequest, StepNews
from conch.host.live import LiveRequest
from conch.host.session import Session


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request that an engine is about to hear of."""

    request: LiveRequest
    message: AddRequest


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nobody waits for a request any more."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A request could not be handed to the engine."""

    request_id: int
    error: RequestError


@dataclass(frozen=True, slots=True)
class Held:
    """A request that came while no engine serves."""

    request: LiveRequest
    message: AddRequest


@dataclass(frozen=True, slots=True)
class EngineUp:
    """An engine serves."""

    session: Session


@dataclass(frozen=True, slots=True)
class EngineDown:
    """An engine that served is gone."""

    session: Session
    error: RequestError


@dataclass(frozen=True, slots=True)
class HoldOver:
    """A held request has waited as long as it may."""


@dataclass(frozen=True, slots=True)
class EngineGivenUp:
    """No engine serves, and one has failed to start several times in a row."""


@dataclass(frozen=True, slots=True)
class EndAll:
    """The server shuts down."""

    error: RequestError


@dataclass(frozen=True, slots=True)
class Close:
    """The model is unloaded."""

    error: RequestError


Event = (
    Arrived
    | Held
    | ClientGone
    | Failed
    | EngineUp
    | EngineDown
    | EngineGivenUp
    | HoldOver
    | EndAll
    | Close
    | StepNews
)
