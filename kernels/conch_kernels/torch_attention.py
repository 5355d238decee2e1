"""Paged attention with torch operations: rows of one token batched, longer rows one by one.

Letters: T tokens, R rows, B blocks, H query heads, K KV heads, G = H / K, D head size, N blocks in the pool,
S tokens in a block; b rows, n queries a row and L keys a row of one group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from conch_kernels.paged import Rows, Scores

_SPLIT_TOKENS = 128
"""A group of its own costs about as much as gathering this many tokens in vain."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Rows that are computed together.

    Attributes
    ----------
    tokens : slice or int64 [b]
        Where the group's ``b * n`` queries are among the step's tokens.
    num_rows, num_queries
        b and n.
    blocks : int32 [b * L / S]
        Blocks to gather.
    mask : bool [b, 1, n, L] or None
        Which keys each query sees; None for plainly causal rows that start at position 0.
    beyond : int64
        Where among the ``b * L`` keys those past a row's end are: they may hold anything, NaN too, which no
        mask keeps out.
    """

    tokens: slice | torch.Tensor
    num_rows: int
    num_queries: int
    blocks: torch.Tensor
    mask: torch.Tensor | None
    beyond: torch.Tensor


def group_rows(rows: Rows, window: int | None) -> list[Group]:
    """Arrange the rows of a step for layers with this window. Gathers no block before the window."""
    counts = [end - begin for begin, end in zip(rows.cu_query, rows.cu_query[1:], strict=False)]
    single = [row for row, count in enumerate(counts) if count == 1]
    groups = [_make_group(rows, members, 1, window) for members in _buckets(rows, single, window)]
    groups.extend(_make_group(rows, [row], count, window) for row, count in enumerate(counts) if count > 1)
    return groups


def _reach(length: int, window: int | None) -> int:
    return length if window is None else min(length, window)


def _buckets(rows: Rows, members: list[int], window: int | None) -> list[list[int]]:
    """Split rows so that none is padded to much more than twice its length."""
    ordered = sorted(members, key=lambda row: -_reach(rows.seq_lens[row], window))
    buckets: list[list[int]] = []
    longest = 0
    for row in ordered:
        length = _reach(rows.seq_lens[row], window)
        if not buckets or (2 * length < longest and longest - length > _SPLIT_TOKENS):
            buckets.append([])
            longest = length
        buckets[-1].append(row)
    return buckets


def _make_group(rows: Rows, members: list[int], count: int, window: int | None) -> Group:
    size, device = rows.block_size, rows.block_tables.device
    ends = [rows.seq_lens[row] for row in members]
    firsts = [0 if window is None else max(0, end - count - window + 1) // size for end in ends]
    width = max(-(-end // size) - first for end, first in zip(ends, firsts, strict=True))
    if len(members) == 1:
        begin = rows.cu_query[members[0]]
        tokens: slice | torch.Tensor = slice(begin, begin + count)
        blocks = rows.block_tables[members[0], firsts[0] : firsts[0] + width]
    else:
        tokens = torch.tensor([rows.cu_query[row] for row in members], device=device)
        columns = torch.tensor(firsts, device=device)[:, None] + torch.arange(width, device=device)
        columns.clamp_(max=rows.block_tables.shape[1] - 1)  # past a row's end: `beyond` below
        blocks = rows.block_tables[torch.tensor(members, device=device)[:, None], columns].flatten()
    if count > 1 and ends[0] == count and (window is None or window >= count):
        return Group(tokens, 1, count, blocks, None, torch.empty(0, dtype=torch.int64, device=device))
    last = torch.tensor(ends, device=device)[:, None, None] - 1
    queries = last - torch.arange(count - 1, -1, -1, device=device)[:, None]  # [b, n, 1]
    keys = torch.tensor(firsts, device=device)[:, None, None] * size + torch.arange(
        width * size, device=device
    )
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    beyond = torch.nonzero((keys > last).flatten()).squeeze(1)
    return Group(tokens, len(members), count, blocks, mask[:, None], beyond)


def write_kv(kv: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Put key [T, K, D] and value [T, K, Dv] into the pool [2, N, S, K, max(D, Dv)] at `slots` [T]."""
    flat = kv.flatten(1, 2)
    flat[0, ..., : key.shape[-1]].index_copy_(0, slots, key)
    flat[1, ..., : value.shape[-1]].index_copy_(0, slots, value)


def attend(
    query: torch.Tensor,
    kv: torch.Tensor,
    groups: list[Group],
    value_size: int,
    scores: Scores,
) -> torch.Tensor:
    """Attend group by group; returns [T, H, Dv] for query [T, H, D]."""
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads = kv.shape[3]
    output = query.new_empty(num_tokens, num_heads, value_size)
    for group in groups:
        gathered = kv.index_select(1, group.blocks)
        gathered.flatten(1, 2).index_fill_(1, group.beyond, 0)
        keys, values = gathered.view(2, group.num_rows, -1, num_kv_heads, kv.shape[4]).transpose(2, 3)
        if group.mask is None:
            keys, values = keys[:, :, : group.num_queries], values[:, :, : group.num_queries]
        queries = query[group.tokens].view(group.num_rows, group.num_queries, num_heads, head_size)
        result = _dense(
            queries.transpose(1, 2),
            keys[..., :head_size],
            values[..., :value_size],
            group.mask,
            scores,
        )
        output[group.tokens] = result.transpose(1, 2).reshape(-1, num_heads, value_size)
    return output


def _dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    how: Scores,
) -> torch.Tensor:
    """Attention of query [b, H, n, D] to key, value [b, K, L, D]; returns [b, H, n, D]."""
    num_rows, num_heads, num_queries, head_size = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    if how.softcap is not None or how.sinks is not None:
        return _dense_fp32(query, key, value, mask, how)
    if num_queries == 1:  # the heads of a group stand in for queries: nothing is repeated
        folded = query.reshape(num_rows, num_kv_heads, group, head_size)
        result = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=how.scale)
        return result.reshape(num_rows, num_heads, 1, -1)
    # Longer rows come alone: their KV heads stand in for rows, and the heads of a group share them.
    split = query.reshape(num_kv_heads, group, num_queries, head_size)
    key, value = (part.transpose(0, 1).expand(-1, group, -1, -1) for part in (key, value))
    result = F.scaled_dot_product_attention(
        split, key, value, attn_mask=mask, is_causal=mask is None, scale=how.scale
    )
    return result.reshape(1, num_heads, num_queries, -1)


def _dense_fp32(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    how: Scores,
) -> torch.Tensor:
    """Attend as `_dense` does, with soft cap and sinks, which torch's own attention lacks."""
    num_rows, num_heads, num_queries, head_size = query.shape
    num_kv_heads, num_keys = key.shape[1], key.shape[2]
    grouped = query.reshape(num_rows, num_kv_heads, -1, head_size).float()
    scores = (grouped @ key.float().transpose(2, 3) * how.scale).view(
        num_rows, num_heads, num_queries, num_keys
    )
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    if mask is None:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~mask, float("-inf"))
    if how.sinks is not None:
        sink = how.sinks.float().view(1, num_heads, 1, 1).expand(num_rows, -1, num_queries, -1)
        scores = torch.cat([scores, sink], dim=3)
    weights = torch.softmax(scores, dim=3)[..., :num_keys]
    folded = weights.reshape(num_rows, num_kv_heads, -1, num_keys)
    result = (folded @ value.float()).view(num_rows, num_heads, num_queries, -1)
    return result.to(query.dtype)
