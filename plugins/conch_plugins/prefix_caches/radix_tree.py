"""A tree over tokens whose edges hold runs of them, and the cached blocks that end in each run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from conch_plugins.prefix_caches.block_cache import Entry
from conch_plugins.prefix_caches.trail import TOKEN_BYTES


@dataclass(slots=True, eq=False)
class BlockEntry(Entry):
    """Block `index`, counted from the root, of the path that ends in `node`.

    It is stored while its KV lies anywhere. One that is not keeps its place while others are behind it.
    """

    node: Node
    index: int
    is_stored: bool = False


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens behind its parent, from byte `start` of the path on.

    A block belongs to the node in which it ends, wherever it begins: with blocks of four tokens,

        root --[a b c d e]--+--[f g h]            a..d in the first node, e..h in its first child
                            +--[x y z p q r s]    e..z and p..s in the other one

    so several children may each have a block that begins with the last tokens of their parent.

    Attributes
    ----------
    key
        The first token, or the salt of all that is behind a root.
    blocks
        Entries of the blocks that end here, in order.
    children
        By their keys.
    cuts
        Grows whenever tokens are taken from the node's end: whoever noted a place in it must look anew.
    """

    parent: Node | None
    key: bytes
    start: int
    tokens: bytearray
    blocks: list[BlockEntry] = field(default_factory=list)
    children: dict[bytes, Node] = field(default_factory=dict)
    cuts: int = 0

    @property
    def end(self) -> int:
        """Bytes of the path up to here."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Place:
    """A point on the path that ends in a node: so many bytes from the root."""

    node: Node
    depth: int


class RadixTree:
    """Runs of tokens behind roots, one root for each salt.

    Parameters
    ----------
    block_bytes
        Encoded tokens of a block.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._top = Node(None, b"", 0, bytearray())

    def find_root(self, salt: str) -> Place | None:
        """Return where all paths of a salt begin; None where there are none."""
        root = self._top.children.get(salt.encode())
        return None if root is None else Place(root, 0)

    def root(self, salt: str) -> Place:
        """Return where all paths of a salt begin."""
        key = salt.encode()
        root = self._top.children.get(key)
        if root is None:
            root = self._top.children[key] = Node(self._top, key, 0, bytearray())
        return Place(root, 0)

    def walk(self, place: Place, data: bytearray, end: int) -> Place:
        """Follow `data`, which agrees up to `place`, as far as the tree agrees with its first `end` bytes."""
        node, depth = place.node, place.depth
        while depth < end:
            if depth == node.end:
                child = node.children.get(bytes(data[depth : depth + TOKEN_BYTES]))
                if child is None:
                    break
                node = child
            count = min(node.end, end) - depth
            agreed = _common(node.tokens, depth - node.start, data, depth, count)
            depth += agreed
            if agreed < count:
                break
        return Place(node, depth)

    def blocks(self, place: Place, first: int) -> list[BlockEntry]:
        """Return the entries from index `first` on that end on the path up to a place."""
        parts: list[list[BlockEntry]] = []
        end = place.depth // self._block_bytes
        node: Node | None = place.node
        while node is not None and end > first:
            before = node.start // self._block_bytes
            parts.append(node.blocks[max(0, first - before) : end - before])
            end, node = before, node.parent
        return [entry for part in reversed(parts) for entry in part]

    def crossing(self, place: Place) -> Iterator[BlockEntry]:
        """Yield the entries of blocks that agree up to a place inside them, in any branch behind it."""
        index = place.depth // self._block_bytes
        nodes = [place.node]
        while nodes:
            node = nodes.pop()
            offset = index - node.start // self._block_bytes
            if offset < len(node.blocks):
                yield node.blocks[offset]
            else:
                nodes.extend(node.children.values())

    def extend(self, place: Place, data: bytearray, end: int) -> Place:
        """Make the tree agree with the first `end` bytes of `data`, which it does up to `place`."""
        node, depth = place.node, place.depth
        if depth == end:
            return place
        if depth < node.end:
            node = self._split(node, depth)
        fresh = data[depth:end]
        if node.children or not node.tokens:
            leaf = Node(node, bytes(fresh[:TOKEN_BYTES]), depth, fresh)
            node.children[leaf.key] = leaf
            node = leaf
        else:
            node.tokens += fresh
        first = node.start // self._block_bytes + len(node.blocks)
        node.blocks += [BlockEntry(node, index) for index in range(first, end // self._block_bytes)]
        return Place(node, end)

    def prune(self, node: Node) -> None:
        """Take away, from a node up, what no stored block needs."""
        while not node.children and node.parent is not None:
            while node.blocks and not node.blocks[-1].is_stored:
                node.blocks.pop()
            if node.blocks:
                self._cut(node, (node.blocks[-1].index + 1) * self._block_bytes)
                return
            parent = node.parent
            del parent.children[node.key]
            node.parent = None
            node.cuts += 1
            node = parent
        if len(node.children) == 1 and 0 < len(node.tokens) < self._block_bytes:
            self._join(node)

    @staticmethod
    def _cut(node: Node, end: int) -> None:
        if end < node.end:
            del node.tokens[end - node.start :]
            node.cuts += 1

    def _split(self, node: Node, depth: int) -> Node:
        """Cut a node in two, and return the new one before it: what was noted of its end stays true."""
        parent, size = node.parent, depth - node.start
        assert parent is not None, "a root has no tokens to split"
        head = Node(parent, node.key, node.start, node.tokens[:size])
        parent.children[head.key] = head
        count = depth // self._block_bytes - node.start // self._block_bytes
        head.blocks, node.blocks = node.blocks[:count], node.blocks[count:]
        for entry in head.blocks:
            entry.node = head
        node.tokens = node.tokens[size:]
        node.parent, node.key, node.start = head, bytes(node.tokens[:TOKEN_BYTES]), depth
        head.children[node.key] = node
        return head

    @staticmethod
    def _join(node: Node) -> None:
        """Put a short run and its only child into one: else runs would be ever shorter with time."""
        (child,), parent = node.children.values(), node.parent
        assert parent is not None, "a root has no tokens to join"
        for entry in node.blocks:
            entry.node = child
        child.blocks = node.blocks + child.blocks
        child.tokens = node.tokens + child.tokens
        child.parent, child.key, child.start = parent, node.key, node.start
        parent.children[child.key] = child
        node.parent = None
        node.cuts += 1


def _common(run: bytearray, offset: int, data: bytearray, depth: int, count: int) -> int:
    """Return how many of `count` bytes agree, in whole tokens."""
    if run[offset : offset + count] == data[depth : depth + count]:
        return count
    same, other = 0, count // TOKEN_BYTES  # the first `same` tokens agree, the first `other` do not
    while other - same > 1:
        middle = (same + other) // 2
        left, right = same * TOKEN_BYTES, middle * TOKEN_BYTES
        if run[offset + left : offset + right] == data[depth + left : depth + right]:
            same = middle
        else:
            other = middle
    return same * TOKEN_BYTES
