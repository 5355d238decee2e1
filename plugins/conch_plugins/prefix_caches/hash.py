"""Full blocks, found by the hash of the tokens up to their end."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from conch.api import Match, Request

BlockHash = Callable[[bytes, tuple[int, ...]], bytes]
"""From the digest of the block before and the tokens of a block to the digest of the block."""


def blake2b_hash(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """Hash with blake2b, 128 bits."""
    return blake2b(array("q", tokens).tobytes(), key=parent, digest_size=16).digest()


@dataclass(slots=True, eq=False)
class Entry:
    """A cached block: the KV of `tokens` behind everything that `parent` stands for.

    The root of a chain has no parent, and its salt in place of tokens.
    """

    parent: Entry | None
    tokens: tuple[int, ...] | str
    digest: bytes
    block: int | None


@dataclass(slots=True, eq=False)
class _Chain:
    """What is known of one request's prefix: digests of its full blocks, and its last entry.

    A closed chain inserts no more: one of its blocks collided with another prefix.
    """

    root: Entry
    last: Entry
    digests: list[bytes] = field(default_factory=list)
    num_inserted: int = 0
    closed: bool = False


@dataclass(slots=True)
class _Index:
    """Entries by digest and by block."""

    by_digest: dict[bytes, Entry] = field(default_factory=dict)
    by_block: dict[int, Entry] = field(default_factory=dict)

    def add(self, entry: Entry, block: int) -> None:
        self.by_digest[entry.digest] = entry
        self.by_block[block] = entry

    def remove(self, block: int) -> None:
        del self.by_digest[self.by_block.pop(block).digest]


class HashPrefixCache:
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
    """

    def __init__(self, block_size: int, fingerprint: str, block_hash: BlockHash = blake2b_hash) -> None:
        self._block_size = block_size
        self._fingerprint = fingerprint
        self._hash = block_hash
        self._index = _Index()
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._chains: dict[int, _Chain] = {}

    @property
    def num_evictable(self) -> int:
        """Cached blocks without a user."""
        return len(self._evictable)

    def match(self, request: Request) -> Match:
        """Find the longest cached prefix that leaves a token to compute."""
        chain = self._chain(request)
        full = (request.num_tokens - 1) // self._block_size
        self._extend(chain, request, full)
        entry = chain.root
        blocks: list[int] = []
        for index in range(full):
            found = self._index.by_digest.get(chain.digests[index])
            if found is None or not self._holds(found, entry, self._tokens(request, index)):
                break
            assert found.block is not None, "only roots have no block, and roots are not indexed"
            blocks.append(found.block)
            entry = found
        return Match(tuple(blocks), len(blocks) * self._block_size)

    def insert(self, request: Request, blocks: Sequence[int], num_computed: int) -> None:
        """Remember the full blocks among the computed tokens that were not offered yet.

        A block whose prefix is cached already is not remembered: the first stays.
        """
        chain = self._chain(request)
        full = min(num_computed, request.num_tokens) // self._block_size
        self._extend(chain, request, full)
        while chain.num_inserted < full and not chain.closed:
            index = chain.num_inserted
            self._insert_block(chain, chain.digests[index], self._tokens(request, index), blocks[index])
            chain.num_inserted += 1

    def _insert_block(self, chain: _Chain, digest: bytes, tokens: tuple[int, ...], block: int) -> None:
        found = self._index.by_digest.get(digest)
        if found is not None:
            chain.closed = not self._holds(found, chain.last, tokens)
            chain.last = found
            return
        entry = Entry(chain.last, tokens, digest, block)
        if block not in self._index.by_block:
            self._index.add(entry, block)
        chain.last = entry

    def forget(self, request_id: int) -> None:
        """Drop the request's chain."""
        self._chains.pop(request_id, None)

    def holds(self, block: int) -> bool:
        """Whether the block is cached."""
        return block in self._index.by_block

    def discard(self, blocks: Sequence[int]) -> None:
        """Forget blocks that are in use; what was cached behind them can be found no more, and ages out."""
        for block in blocks:
            if block in self._index.by_block:
                self._index.remove(block)

    def keep(self, block: int) -> bool:
        """Take over a block whose last user left, if it is cached."""
        if block not in self._index.by_block:
            return False
        self._evictable[block] = None
        return True

    def reuse(self, block: int) -> None:
        """Note that an evictable block has a user again."""
        del self._evictable[block]

    def evict(self, count: int) -> list[int]:
        """Give up blocks, least recently used first."""
        evicted: list[int] = []
        while self._evictable and len(evicted) < count:
            block, _ = self._evictable.popitem(last=False)
            self._index.remove(block)
            evicted.append(block)
        return evicted

    def _chain(self, request: Request) -> _Chain:
        chain = self._chains.get(request.id)
        if chain is None:
            key = f"{len(self._fingerprint)}:{self._fingerprint}{request.cache_salt}"
            digest = blake2b(key.encode(), digest_size=16).digest()
            root = Entry(None, request.cache_salt, digest, None)
            chain = self._chains[request.id] = _Chain(root, root)
        return chain

    def _tokens(self, request: Request, index: int) -> tuple[int, ...]:
        start = index * self._block_size
        return tuple(request.token_ids[start : start + self._block_size])

    def _extend(self, chain: _Chain, request: Request, count: int) -> None:
        """Know the digests of the first `count` blocks; each once, since tokens are only ever appended."""
        known = chain.digests
        for index in range(len(known), count):
            parent = known[-1] if known else chain.root.digest
            known.append(self._hash(parent, self._tokens(request, index)))

    @staticmethod
    def _holds(found: Entry, parent: Entry, tokens: tuple[int, ...]) -> bool:
        """Whether an entry is that of `tokens` behind `parent`, whatever the digests say."""
        if found.tokens != tokens:
            return False
        if found.parent is not parent:
            if not _same_prefix(found.parent, parent):
                return False
            found.parent = parent
        return True


def _same_prefix(one: Entry | None, other: Entry | None) -> bool:
    while one is not other:
        if one is None or other is None or one.tokens != other.tokens:
            return False
        one, other = one.parent, other.parent
    return True
