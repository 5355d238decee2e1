"""Blocks found by a tree over tokens: a hit counts tokens, not blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conch.api import Arena, Match, Request
from conch_plugins.prefix_caches.block_cache import NOWHERE, BlockCache
from conch_plugins.prefix_caches.event_log import SILENT, EventLog
from conch_plugins.prefix_caches.radix_tree import BlockEntry, Node, Place, RadixTree
from conch_plugins.prefix_caches.trail import TOKEN_BYTES, Trail, root_digest


class RadixTrail(Trail):
    """A request's tokens, and how many blocks of them were inserted; the last of those ends in `node`."""

    __slots__ = ("cuts", "node", "num_inserted")

    def __init__(self, request: Request, block_bytes: int, root: bytes) -> None:
        super().__init__(request, block_bytes, root)
        self.num_inserted = 0
        self.node: Node | None = None
        self.cuts = 0

    def resume(self, block_bytes: int) -> Place | None:
        """Return where the inserted blocks end; None where the tree has lost some of them since."""
        node, depth = self.node, self.num_inserted * block_bytes
        if node is None or node.cuts != self.cuts:
            return None
        while depth <= node.start:  # it was split
            assert node.parent is not None, "only roots have no parent, and nothing is before them"
            node = node.parent
        return Place(node, depth)

    def note(self, place: Place, num_inserted: int) -> None:
        """Remember where the inserted blocks end."""
        self.num_inserted, self.node, self.cuts = num_inserted, place.node, place.node.cuts


class RadixPrefixCache(BlockCache[BlockEntry]):
    """Keeps the tokens themselves, in a tree of runs: what is found agrees by construction.

    Where a request leaves the tree inside a block, the tokens that agree are of use, too: the KV manager
    copies the block before the request writes behind them. Less than a quarter of a block is not worth that.

    A match takes time in the tokens that agree, an insertion in those that are new, an eviction none that
    depends on the size of the tree.

    Parameters
    ----------
    block_size
        Tokens in a block.
    fingerprint
        Identifies the weights, for those who follow the cache.
    slots
        Slots of lower tiers for evicted blocks, the nearest tier first.
    log
        Told of what is stored and removed.
    """

    def __init__(
        self,
        block_size: int,
        fingerprint: str,
        slots: Mapping[Arena, range] = NOWHERE,
        log: EventLog = SILENT,
    ) -> None:
        super().__init__(block_size, slots, log)
        self._block_bytes = block_size * TOKEN_BYTES
        self._least_partial = max(1, block_size // 4)
        self._fingerprint = fingerprint
        self._tree = RadixTree(self._block_bytes)
        self._trails: dict[int, RadixTrail] = {}

    def match(self, request: Request) -> Match:
        """Find the longest cached prefix that leaves a token to compute."""
        root = self._tree.find_root(request.cache_salt)
        if root is None:
            return Match()
        most = request.num_tokens - 1
        place = self._tree.walk(root, self._trail(request).read(most), most * TOKEN_BYTES)
        entries = self._tree.blocks(place, 0)
        blocks: list[int] = []
        for entry in entries:
            if entry.block is None:
                below = self._num_below(entries[len(blocks) :])
                return Match(tuple(blocks), len(blocks) * self._block_size, below * self._block_size)
            blocks.append(entry.block)
        num_tokens = len(blocks) * self._block_size
        agreed = place.depth // TOKEN_BYTES
        if agreed - num_tokens >= self._least_partial:
            partial = next((e.block for e in self._tree.crossing(place) if e.block is not None), None)
            if partial is not None:
                return Match((*blocks, partial), agreed)
        return Match(tuple(blocks), num_tokens)

    def restore(self, request: Request, blocks: Sequence[int], num_tokens: int) -> int:
        """Bring back what lies in lower tiers behind the first `num_tokens` tokens."""
        root = self._tree.find_root(request.cache_salt)
        if root is None:
            return num_tokens
        trail = self._trail(request)
        most = min(request.num_tokens - 1, len(blocks) * self._block_size)
        place = self._tree.walk(root, trail.read(most), most * TOKEN_BYTES)
        for entry in self._tree.blocks(place, num_tokens // self._block_size):
            if not self._bring(entry, blocks[entry.index], trail, entry.index):
                break
            num_tokens += self._block_size
        return num_tokens

    def insert(self, request: Request, blocks: Sequence[int], num_computed: int) -> None:
        """Remember the full blocks among the computed tokens that were not offered yet.

        A block whose tokens are cached already is not remembered: the first stays.
        """
        full = min(num_computed, request.num_tokens) // self._block_size
        trail = self._trail(request)
        if full <= trail.num_inserted:
            return
        place, first = trail.resume(self._block_bytes), trail.num_inserted
        if place is None:
            place, first = self._tree.root(request.cache_salt), 0
        data, end = trail.read(full * self._block_size), full * self._block_bytes
        place = self._tree.extend(self._tree.walk(place, data, end), data, end)
        for entry in self._tree.blocks(place, first):
            if entry.block is None:
                entry.is_stored |= self._add(entry, blocks[entry.index], trail, entry.index)
        trail.note(place, full)

    def forget(self, request_id: int) -> None:
        """Drop the request's trail."""
        self._trails.pop(request_id, None)

    def _trail(self, request: Request) -> RadixTrail:
        trail = self._trails.get(request.id)
        if trail is None:
            root = root_digest(self._fingerprint, request.cache_salt)
            trail = self._trails[request.id] = RadixTrail(request, self._block_bytes, root)
        return trail

    def _lose(self, entry: BlockEntry) -> None:
        entry.is_stored = False
        self._tree.prune(entry.node)
