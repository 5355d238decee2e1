"""The seam of prefix caches: which blocks hold the KV of which tokens, in the pool and in tiers below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from conch.api.request import Request
from conch.api.steps import Move


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix of a request.

    Attributes
    ----------
    blocks
        Where its KV lies, in order of position.
    num_tokens
        Leading tokens of the request that `blocks` hold. Where the last block agrees with the request in its
        first tokens only, `num_tokens` ends inside it: whoever writes behind them gets a copy of that block.
    num_below
        Tokens behind those, in whole blocks, that `PrefixCache.restore` can bring back from a lower tier.
    """

    blocks: tuple[int, ...] = ()
    num_tokens: int = 0
    num_below: int = 0

    def whole_blocks(self, block_size: int) -> Match:
        """Return the match without a block that agrees in part only."""
        full = self.num_tokens // block_size
        return Match(self.blocks[:full], full * block_size)


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """What lies in the tiers below the KV pool.

    Attributes
    ----------
    host_blocks, disk_blocks
        Cached blocks that lie in the host's memory and on its disk; a block may lie in both, and in the pool.
    host_hits, disk_hits
        Tokens brought back from there since the start.
    """

    host_blocks: int = 0
    disk_blocks: int = 0
    host_hits: int = 0
    disk_hits: int = 0


@runtime_checkable
class PrefixCache(Protocol):
    """Remembers which full blocks hold the KV of which token prefix.

    The KV manager asks `keep` when a block's last user leaves and `evict` when it runs short. A cache
    never returns a block whose tokens differ from the request's, whatever its hash says.
    """

    def match(self, request: Request) -> Match:
        """Find the longest cached prefix of the request, in whole blocks or, where a cache can, in tokens.

        Never covers the last token: its logits are needed, so at least one token is always computed.
        The blocks are not referenced until `KVManager.adopt`.
        """

    def restore(self, request: Request, blocks: Sequence[int], num_tokens: int) -> int:
        """Fill blocks of a request from lower tiers; returns how many of its tokens are in place then.

        The first `num_tokens` are in place already, a number of whole blocks. `blocks` are the request's
        table, those behind that number its own and of no content yet. What is filled is cached there from now
        on, by moves that `take_moves` hands out. It may be less than a match promised.
        """

    def insert(self, request: Request, blocks: Sequence[int], num_computed: int) -> None:
        """Remember the full blocks among the first `num_computed` tokens; called as they complete."""

    def forget(self, request_id: int) -> None:
        """Drop what was kept to make `insert` incremental; the cached blocks stay."""

    def holds(self, block: int) -> bool:
        """Whether the block is cached: it may be shared at any time, so it must not be written to."""

    def discard(self, blocks: Sequence[int]) -> None:
        """Forget what these blocks hold, all of them in use: it has turned out not to be trusted."""

    def keep(self, block: int) -> bool:
        """Take over a block whose last user left: True if it is cached and now evictable."""

    def reuse(self, block: int) -> None:
        """Note that an evictable block has a user again."""

    def evict(self, count: int) -> list[int]:
        """Give up to `count` evictable blocks back, least recently used first."""

    @property
    def num_evictable(self) -> int:
        """Cached blocks without a user."""

    def take_moves(self) -> tuple[Move, ...]:
        """Hand out the moves between tiers since the last call: all must be made, in this order."""

    def end_step(self, moves: Sequence[Move], failed: Sequence[int]) -> None:
        """Note that a step was done, and its moves, but for those at the indices in `failed`."""

    def stats(self) -> PrefixCacheStats:
        """Return what lies in lower tiers, and what came back from them."""

    def close(self) -> None:
        """Let go of whatever it has opened; nothing is called afterwards."""
