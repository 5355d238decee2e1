"""How many KV blocks there are, and the tensors that hold them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from conch.api import AttentionKernel, ConfigError, EngineConfig, ModelSpec

MIB = 1 << 20


def block_bytes(spec: ModelSpec, kernel: AttentionKernel) -> int:
    """Bytes of one block over all layers."""
    dtype = getattr(torch, spec.attention.pool_dtype)
    return math.prod(kernel.kv_shape(1)) * int(dtype.itemsize) * spec.num_layers


def most_useful_blocks(config: EngineConfig, spec: ModelSpec) -> int:
    """Blocks that as many requests as may run can fill to the context length."""
    return config.max_num_seqs * -(-spec.max_model_len // config.block_size)


def blocks_in(
    config: EngineConfig, spec: ModelSpec, kernel: AttentionKernel, free_bytes: int, others_bytes: int = 0
) -> int:
    """Return the number of blocks: the override, else what fits into `free_bytes`.

    `others_bytes` is what a block takes in the pools of other models.

    Without a prefix cache never more than is useful: what no running request can fill stays empty.

    Raises
    ------
    ConfigError
        Not one block fits.
    """
    each = block_bytes(spec, kernel) + others_bytes
    fitting = config.num_gpu_blocks_override or free_bytes // each
    if fitting < 1:
        raise ConfigError(
            f"no KV block fits: one of {config.block_size} tokens takes {each / MIB:.2f} MiB, and "
            f"{max(free_bytes, 0) / MIB:.2f} MiB are left; raise kv_cache_memory_bytes "
            "(or gpu_memory_utilization)"
        )
    if config.num_gpu_blocks_override or config.enable_prefix_caching:
        return fitting
    return min(fitting, most_useful_blocks(config, spec))


def allocate_pools(spec: ModelSpec, kernel: AttentionKernel, num_blocks: int) -> list[torch.Tensor]:
    """Allocate one pool a layer, zeroed."""
    dtype, device = getattr(torch, spec.attention.pool_dtype), torch.device(spec.attention.device)
    shape = kernel.kv_shape(num_blocks)
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]


def allocate_in_host(pools: Sequence[torch.Tensor], num_bytes: int, key: str) -> list[torch.Tensor]:
    """Allocate the like of each pool in the memory of the host, of as many blocks as fit into `num_bytes`.

    Raises
    ------
    ConfigError
        Not one block fits; `key` is what set the size.
    """
    each = sum(pool[:, :1].nbytes for pool in pools)
    if num_bytes < each:
        raise ConfigError(f"{key} ({num_bytes} bytes) holds no KV block: one takes {each} bytes")
    count = num_bytes // each
    return [
        torch.zeros((2, count, *pool.shape[2:]), dtype=pool.dtype, pin_memory=pool.device.type == "cuda")
        for pool in pools
    ]
