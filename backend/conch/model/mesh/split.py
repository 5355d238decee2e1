"""Who holds what: layers of a stage, heads and columns of a part."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from conch.api import AttentionSpec, ModelSpec
from conch.api.mesh import Seat

Range = tuple[int, int]


def part_of(total: int, parts: int, index: int) -> Range:
    """Cut ``[0, total)`` into `parts` pieces as equal as can be; return the one of `index`."""
    return total * index // parts, total * (index + 1) // parts


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one part: query heads, and the KV heads that they read."""

    query: Range
    kv: Range

    @classmethod
    def all_of(cls, attention: AttentionSpec) -> Heads:
        """Return the heads of a model whose attention every part computes whole."""
        return cls((0, attention.num_heads), (0, attention.num_kv_heads))

    @classmethod
    def of(cls, attention: AttentionSpec, seat: Seat) -> Heads:
        """Divide the heads of a model; KV heads are replicated where there are more parts than heads.

        What cannot be divided has been refused before (`conch.api.mesh_config.check_model`).
        """
        heads, kv_heads, parts = attention.num_heads, attention.num_kv_heads, seat.shape.tensor
        query = part_of(heads, parts, seat.part)
        if kv_heads % parts == 0:
            return cls(query, part_of(kv_heads, parts, seat.part))
        one = query[0] * kv_heads // heads
        return cls(query, (one, one + 1))


def part_of_heads(total: int, mine: Heads, attention: AttentionSpec) -> Range:
    """Return the rows of an attention layer's matrix, `total` of all heads, that belong to `mine`."""
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    of_kv = {kv_heads * attention.head_size, kv_heads * attention.value_head_size}
    of_query = {heads * attention.head_size, heads * attention.value_head_size}
    is_kv = total in of_kv - of_query
    each = total // (kv_heads if is_kv else heads)
    first, last = mine.kv if is_kv else mine.query
    return first * each, last * each


def share_of(spec: ModelSpec, heads: Heads, layers: Range) -> ModelSpec:
    """Return what a rank's own attention and KV pool look like."""
    attention = dataclasses.replace(
        spec.attention,
        num_heads=heads.query[1] - heads.query[0],
        num_kv_heads=heads.kv[1] - heads.kv[0],
        windows=spec.attention.windows[slice(*layers)],
    )
    return dataclasses.replace(spec, attention=attention)
