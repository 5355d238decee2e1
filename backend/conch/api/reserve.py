"""What those who run will still need of the pool: an admission leaves it to them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from conch.api.plan_parts import PlanLimits
from conch.api.request import Request
from conch.api.seams import BlockUpdate, KVManager
from conch.api.steps import NO_BLOCK


class Reserve:
    """Counts the blocks that running requests are owed, once an admission asks for them.

    Parameters
    ----------
    manager
        Whose blocks.
    limits
        Gives the watermark, and what a request holds at most.
    running
        Those who run.
    gone
        Ids of those that this plan preempts: a live view.
    """

    def __init__(
        self, manager: KVManager, limits: PlanLimits, running: Iterable[Request], gone: Collection[int]
    ) -> None:
        self._kv = manager
        self._watermark, self._most_blocks = limits.watermark, limits.most_blocks
        self._seated = list(running)
        self._gone = gone
        self._promised: int | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks that an admission must leave; no watermark for one alone."""
        if self._promised is None:
            self._promised = sum(self.short(one) for one in self._seated if one.id not in self._gone)
        is_alone = len(self._seated) == len(self._gone)
        return self._promised + (0 if is_alone else self._watermark)

    def short(self, request: Request) -> int:
        """Blocks that a request does not hold yet and needs until its next token is sampled and computed."""
        tokens = max(request.num_tokens, min(request.num_tokens + 1, request.limit - 1))
        table = self._kv.blocks(request.id)
        short = -(-tokens // self._kv.block_size) - len(table)
        if short <= 0:
            return 0
        return max(0, min(short, self._most_blocks - len(table) + table.count(NO_BLOCK)))

    def grow(self, request: Request, start: int, end: int) -> BlockUpdate | None:
        """Grow the table of one who runs, as `KVManager.grow` does."""
        if self._promised is None:
            return self._kv.grow(request.id, start, end)
        before = self.short(request)
        update = self._kv.grow(request.id, start, end)
        self._promised += self.short(request) - before
        return update

    def join(self, request: Request) -> None:
        """Count one who has been admitted."""
        self._seated.append(request)
        if self._promised is not None:
            self._promised += self.short(request)

    def recount(self) -> None:
        """Count anew when asked: somebody has gone."""
        self._promised = None
