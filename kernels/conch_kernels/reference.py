"""What each kernel means, written to be read: dense, in fp32, one row after the other."""

from __future__ import annotations

import torch

from conch_kernels.paged import Rows, Scores


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: torch.Tensor,
    rows: Rows,
    scores: Scores,
) -> torch.Tensor:
    """Write KV into the pool, then let every query attend to its own row's past.

    Letters: T tokens, R rows, B blocks, H query heads, K KV heads, D head size, N blocks in the pool, S
    tokens in a block.

    Parameters
    ----------
    query : [T, H, D]
    key, value : [T, K, D]
    kv : [2, N, S, K, D]
        Keys, then values; written in place.
    rows, scores
        What to attend to, and how.

    Returns
    -------
    [T, H, D], of the dtype of `query`.
    """
    num_heads, num_kv_heads, block_size = query.shape[1], key.shape[1], rows.block_size
    for token, slot in enumerate(rows.slot_mapping.tolist()):
        kv[0, slot // block_size, slot % block_size] = key[token]
        kv[1, slot // block_size, slot % block_size] = value[token]

    output = torch.zeros(*query.shape[:2], value.shape[2], dtype=torch.float32, device=query.device)
    for row, length in enumerate(rows.seq_lens):
        begin, end = rows.cu_query[row], rows.cu_query[row + 1]
        positions = torch.arange(length)
        slots = [int(rows.block_tables[row, position // block_size]) for position in positions]
        keys = kv[0, slots, positions % block_size].float()  # [length, K, D]
        values = kv[1, slots, positions % block_size].float()
        for token in range(begin, end):
            position = length - (end - token)
            first = 0 if scores.window is None else max(0, position - scores.window + 1)
            for head in range(num_heads):
                seen = (slice(first, position + 1), head * num_kv_heads // num_heads)
                products = keys[seen] @ query[token, head].float() * scores.scale
                if scores.softcap is not None:
                    products = scores.softcap * torch.tanh(products / scores.softcap)
                sinks = scores.sinks
                sink = products.new_empty(0) if sinks is None else sinks[head].float().reshape(1)
                weights = torch.softmax(torch.cat([products, sink]), dim=0)[: len(products)]
                output[token, head] = weights @ values[seen]
    return output.to(query.dtype)
