"""What a cache looks up: the tokens of a request, encoded once, and the digests of its full blocks."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import blake2b

from conch.api import Request

TOKEN_BYTES = array("i").itemsize
DIGEST_BYTES = 16

BlockHash = Callable[[bytes, bytes], bytes]
"""From the digest of the block before and the encoded tokens of a block to the digest of the block."""


def blake2b_hash(parent: bytes, tokens: bytes) -> bytes:
    """Hash with blake2b, 128 bits."""
    return blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()


def root_digest(fingerprint: str, salt: str) -> bytes:
    """Return what the digests of all prefixes of these weights and this salt begin with."""
    key = f"{len(fingerprint)}:{fingerprint}{salt}"
    return blake2b(key.encode(), digest_size=DIGEST_BYTES).digest()


class Trail:
    """A request's tokens as bytes. Tokens are only ever appended, so each is encoded and hashed once.

    Parameters
    ----------
    request
        Whose tokens; read again whenever more of them are asked for.
    block_bytes
        Encoded tokens of a block.
    root
        Digest that the first block is chained to.
    block_hash
        Chained over the blocks.
    """

    __slots__ = ("_block_bytes", "_digests", "_hash", "_num_tokens", "_request", "data", "root")

    def __init__(
        self, request: Request, block_bytes: int, root: bytes, block_hash: BlockHash = blake2b_hash
    ) -> None:
        self._request = request
        self._block_bytes = block_bytes
        self._hash = block_hash
        self._num_tokens = 0
        self._digests: list[bytes] = []
        self.root = root
        self.data = bytearray()

    def read(self, num_tokens: int) -> bytearray:
        """Return the encoded tokens, at least the first `num_tokens` of them."""
        if self._num_tokens < num_tokens:
            fresh = array("i", self._request.token_ids[self._num_tokens :])
            self.data += fresh.tobytes()
            self._num_tokens += len(fresh)
        return self.data

    def digests(self, num_blocks: int) -> list[bytes]:
        """Return the digests of the full blocks, at least the first `num_blocks` of them."""
        known = self._digests
        if len(known) < num_blocks:
            size = self._block_bytes
            data = bytes(self.read(num_blocks * size // TOKEN_BYTES))
            parent = known[-1] if known else self.root
            for start in range(len(known) * size, num_blocks * size, size):
                parent = self._hash(parent, data[start : start + size])
                known.append(parent)
        return known

    def block_tokens(self, index: int) -> list[int]:
        """Return the token ids of a full block."""
        size = self._block_bytes // TOKEN_BYTES
        return self._request.token_ids[index * size : (index + 1) * size]
