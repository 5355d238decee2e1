"""Who goes when the KV pool runs short, among those whom a scheduler would let go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from conch.api.config import EngineConfig
from conch.api.parking import Parking
from conch.api.request import Request
from conch.api.seams import KVManager

MOST_COMPARED = 64
"""Candidates that are weighed against each other, so that the choice costs the same however many run."""


class VictimPolicy(Protocol):
    """Chooses a victim. A plan builder asks it, and sees to it that everyone makes progress."""

    def choose(self, candidates: Sequence[Request]) -> Request:
        """Return one of the candidates, of which there is at least one, the scheduler's last choice last."""


class LastAdmitted:
    """Whoever stands last in the scheduler's order goes."""

    def choose(self, candidates: Sequence[Request]) -> Request:
        """Return the last."""
        return candidates[-1]


class LeastLoss:
    """Whoever loses the least goes: the fewest tokens to compute again, moves to the host counted in tokens.

    A request that would free nothing, because others hold all of its blocks, goes after all that would. Of
    equals the one that stands last in the scheduler's order goes.

    Parameters
    ----------
    kv_manager
        Knows what a release would free and keep.
    parking
        Knows what moving costs.
    """

    def __init__(self, kv_manager: KVManager, parking: Parking) -> None:
        self._kv = kv_manager
        self._parking = parking

    def choose(self, candidates: Sequence[Request]) -> Request:
        """Weigh the last candidates."""
        return min(reversed(candidates[-MOST_COMPARED:]), key=self._loss)

    def _loss(self, request: Request) -> tuple[bool, float]:
        effect = self._kv.release_effect(request.id)
        lost = max(0, request.num_computed - effect.num_kept)
        return effect.num_freed == 0, self._parking.cost(effect.num_freed, lost)


def make_victim_policy(config: EngineConfig, kv_manager: KVManager, parking: Parking) -> VictimPolicy:
    """Return what `preemption_victim` asks for."""
    if config.preemption_victim == "last_admitted":
        return LastAdmitted()
    return LeastLoss(kv_manager, parking)
