"""The replica that has most of a prompt cached, as long as that one is not busier than the others."""

from __future__ import annotations

from collections.abc import Sequence

from conch.api import EngineConfig, ReplicaLoad, RoutedRequest
from conch_plugins.routers.placed_prefixes import PlacedPrefixes, block_chain

MEMORY_BLOCKS = 1 << 16
"""Prefix blocks remembered for each replica: some 6 MB of the host's memory."""

WAITING_WEIGHT = 4
"""Running requests that one waiting request counts for: it has to wait for one of them to end."""

SLACK = 4
"""Running requests that a prompt which is cached as a whole outweighs, on replicas that are nearly idle."""

SLACK_SHARE = 8
"""The same on busy replicas: one for each so many of the least busy replica's."""


class PrefixAffinityRouter:
    """Weighs what a replica was sent before against its load.

    A replica's weight is ``running + 4 * waiting``. For the share of the prompt's full blocks that were sent
    to it before, up to ``4 + least weight / 8`` is taken off; who weighs least then takes the request. What
    follows is the promise: *the chosen replica never weighs more than the least busy one by more than that*,
    so a system prompt that everybody shares goes to one replica only until others are less busy; then it is
    cached there, too, and counts for nobody. Among equals it goes round. A replica that was started anew has
    nothing cached, requests of different salts share nothing, and memory is bounded (`MEMORY_BLOCKS`).

    Parameters
    ----------
    block_size
        Tokens in a KV block.
    capacity
        Blocks remembered for each replica.
    """

    def __init__(self, block_size: int, capacity: int = MEMORY_BLOCKS) -> None:
        self._block_size = block_size
        self._capacity = capacity
        self._placed: dict[int, PlacedPrefixes] = {}
        self._next = 0

    @classmethod
    def from_config(cls, config: EngineConfig) -> PrefixAffinityRouter:
        """Build one for an engine's blocks; without a prefix cache there is nothing to remember."""
        caches = config.enable_prefix_caching and config.prefix_cache != "none"
        return cls(config.block_size, MEMORY_BLOCKS if caches else 0)

    def place(self, request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> int:
        """Return the index of the replica that weighs least, and remember the prompt as sent there."""
        placed = self._placed = {
            load.engine: self._placed.get(load.engine) or PlacedPrefixes(self._capacity) for load in loads
        }
        chain = block_chain(request, self._block_size) if self._capacity else []
        slack = allowance(min(weight(load) for load in loads))
        count = len(loads)

        def rank(index: int) -> tuple[float, float]:
            load = loads[index]
            share = placed[load.engine].overlap(chain) / len(chain) if chain else 0.0
            return weight(load) - slack * share, load.kv_usage

        chosen = min(((self._next + offset) % count for offset in range(count)), key=rank)
        self._next = (chosen + 1) % count
        placed[loads[chosen].engine].remember(chain)
        return chosen

    @property
    def num_remembered(self) -> int:
        """Blocks remembered for all replicas."""
        return sum(len(prefixes) for prefixes in self._placed.values())


def weight(load: ReplicaLoad) -> int:
    """Return how busy a replica is."""
    return load.running + WAITING_WEIGHT * load.waiting


def allowance(least: int) -> float:
    """Return how much more than `least` a replica may weigh that has the whole prompt cached."""
    return SLACK + least / SLACK_SHARE
