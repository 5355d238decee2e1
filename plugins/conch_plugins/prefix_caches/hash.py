"""Full blocks, found by the hash of the tokens up to their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conch.api import Arena, Match, Request
from conch_plugins.prefix_caches.block_cache import NOWHERE, BlockCache, Entry
from conch_plugins.prefix_caches.event_log import SILENT, EventLog
from conch_plugins.prefix_caches.trail import TOKEN_BYTES, BlockHash, Trail, blake2b_hash, root_digest


@dataclass(slots=True, eq=False)
class ChainEntry(Entry):
    """A cached block: the KV of `tokens` behind everything that `parent` stands for.

    The root of a chain has no parent, and its salt in place of tokens.
    """

    parent: ChainEntry | None
    tokens: bytes
    digest: bytes


class Chain(Trail):
    """A request's tokens, and the entries that they were found under or inserted as.

    A closed chain inserts no more: one of its blocks collided with another prefix.
    """

    __slots__ = ("found", "is_closed", "last", "num_inserted", "start")

    def __init__(self, request: Request, block_bytes: int, root: bytes, block_hash: BlockHash) -> None:
        super().__init__(request, block_bytes, root, block_hash)
        self.start = ChainEntry(None, request.cache_salt.encode(), root)
        self.found: list[ChainEntry] = []
        self.last = self.start
        self.num_inserted = 0
        self.is_closed = False


class HashPrefixCache(BlockCache[ChainEntry]):
    """Finds cached blocks by a chained hash and believes none of it: tokens are compared on every hit.

    An entry is linked to the entry of the block before it, so a hit compares the whole prefix though it looks
    at one block. Where the entry before was evicted and came back, the two are compared once and linked
    again. Hence a collision costs a miss, never another request's KV.

    Parameters
    ----------
    block_size
        Tokens in a block.
    fingerprint
        Identifies the weights.
    block_hash
        Chained over the blocks of a prefix.
    slots
        Slots of lower tiers for evicted blocks, the nearest tier first.
    log
        Told of what is stored and removed.
    """

    def __init__(
        self,
        block_size: int,
        fingerprint: str,
        block_hash: BlockHash = blake2b_hash,
        slots: Mapping[Arena, range] = NOWHERE,
        log: EventLog = SILENT,
    ) -> None:
        super().__init__(block_size, slots, log)
        self._block_bytes = block_size * TOKEN_BYTES
        self._fingerprint = fingerprint
        self._hash = block_hash
        self._by_digest: dict[bytes, ChainEntry] = {}
        self._chains: dict[int, Chain] = {}

    def match(self, request: Request) -> Match:
        """Find the longest cached prefix that leaves a token to compute."""
        found = self._find(self._chain(request), (request.num_tokens - 1) // self._block_size)
        blocks: list[int] = []
        for entry in found:
            if entry.block is None:
                break
            blocks.append(entry.block)
        below = self._num_below(found[len(blocks) :]) if len(blocks) < len(found) else 0
        size = self._block_size
        return Match(tuple(blocks), len(blocks) * size, below * size)

    def restore(self, request: Request, blocks: Sequence[int], num_tokens: int) -> int:
        """Bring back what lies in lower tiers behind the first `num_tokens` tokens."""
        chain, size = self._chain(request), self._block_size
        found = self._find(chain, min((request.num_tokens - 1) // size, len(blocks)))
        for index in range(num_tokens // size, len(found)):
            if not self._bring(found[index], blocks[index], chain, index):
                break
            num_tokens += size
        return num_tokens

    def insert(self, request: Request, blocks: Sequence[int], num_computed: int) -> None:
        """Remember the full blocks among the computed tokens that were not offered yet.

        A block whose prefix is cached already is not remembered: the first stays.
        """
        full = min(num_computed, request.num_tokens) // self._block_size
        chain = self._chain(request)
        if full <= chain.num_inserted or chain.is_closed:
            return
        digests, size = chain.digests(full), self._block_bytes
        data = chain.read(full * self._block_size)
        for index in range(chain.num_inserted, full):
            tokens = bytes(data[index * size : (index + 1) * size])
            entry = self._by_digest.get(digests[index])
            if entry is None:
                entry = ChainEntry(chain.last, tokens, digests[index])
                if self._add(entry, blocks[index], chain, index):
                    self._by_digest[entry.digest] = entry
            elif not _stands_for(entry, chain.last, tokens):
                chain.is_closed = True
                return
            elif entry.block is None:
                self._add(entry, blocks[index], chain, index)
            chain.last = entry
            chain.num_inserted = index + 1

    def forget(self, request_id: int) -> None:
        """Drop the request's chain."""
        self._chains.pop(request_id, None)

    def _chain(self, request: Request) -> Chain:
        chain = self._chains.get(request.id)
        if chain is None:
            root = root_digest(self._fingerprint, request.cache_salt)
            chain = self._chains[request.id] = Chain(request, self._block_bytes, root, self._hash)
        return chain

    def _find(self, chain: Chain, most: int) -> list[ChainEntry]:
        """Return the entries of the longest prefix of at most `most` blocks that lies anywhere.

        What a chain found before is only asked whether it is still there.
        """
        found, index_of = chain.found, self._by_digest
        for index, entry in enumerate(found):
            if index_of.get(entry.digest) is not entry:
                del found[index:]
                break
        if len(found) < most:
            digests, size = chain.digests(most), self._block_bytes
            data = bytes(chain.read(most * self._block_size))
            last = found[-1] if found else chain.start
            for index in range(len(found), most):
                after = index_of.get(digests[index])
                if after is None or not _stands_for(after, last, data[index * size : (index + 1) * size]):
                    break
                found.append(after)
                last = after
        return found[:most]

    def _lose(self, entry: ChainEntry) -> None:
        del self._by_digest[entry.digest]


def _stands_for(entry: ChainEntry, parent: ChainEntry, tokens: bytes) -> bool:
    """Whether an entry is that of `tokens` behind `parent`, whatever the digests say."""
    if entry.tokens != tokens:
        return False
    if entry.parent is not parent:
        if not _same_prefix(entry.parent, parent):
            return False
        entry.parent = parent
    return True


def _same_prefix(one: ChainEntry | None, other: ChainEntry | None) -> bool:
    while one is not other:
        if one is None or other is None or one.tokens != other.tokens:
            return False
        one, other = one.parent, other.parent
    return True
