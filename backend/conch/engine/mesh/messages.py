"""What rank 0 and the other ranks send over their lines, beside orders and news: msgpack, never pickle."""

from __future__ import annotations

import msgspec

from conch.api.config import EngineConfig
from conch.api.mesh import RankJoined, RankOrder, RankReady, Seat
from conch.engine.mesh.meeting import Note


class StartRank(msgspec.Struct, frozen=True, tag="start"):
    """The first message to a rank: what it is.

    Attributes
    ----------
    address
        Of its host, where the other ranks reach it; None is that of its own end of the connection.
    """

    config: EngineConfig
    seat: Seat
    address: str | None


class Dismissal(msgspec.Struct, frozen=True, array_like=True, tag="dismissal"):
    """The last message to a rank: the engine ends as it was told to."""


class RankFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """A rank has failed, and ends."""

    message: str


ToRank = RankOrder | Note | Dismissal
FromRank = RankJoined | RankReady | RankFailed | Note
