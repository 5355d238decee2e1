"""A context to build a plugin from, without a model."""

from __future__ import annotations

from typing import Any

from conch.api import AttentionSpec, BuildContext, EngineConfig, ModelSpec
from conch.api.parking import make_parking
from conch.testing.draft_head import CountingDraftHead
from conch.testing.draft_model import CountingDraftModel
from conch_plugins.kv_managers.paged import PagedKVManager
from conch_plugins.prefix_caches.hash import HashPrefixCache
from conch_plugins.prefix_caches.none import NoPrefixCache

VOCAB_SIZE = 1000

SMALL_ATTENTION = AttentionSpec(
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    value_head_size=8,
    windows=(None,),
    softcap=False,
    sinks=False,
    dtype="float32",
    device="cpu",
    block_size=4,
)


def make_context(
    *,
    num_blocks: int = 64,
    attention: AttentionSpec = SMALL_ATTENTION,
    **settings: Any,  # noqa: ANN401 - each key has its own type
) -> BuildContext:
    """Return a context of a small model.

    Parameters
    ----------
    num_blocks
        Blocks in the KV pool.
    attention
        What the model asks of an attention kernel.
    settings
        Keys of `EngineConfig`; the block size is that of `attention`, and a byte of swap space holds a block.

    Returns
    -------
    A context that has a draft model and a head that count, a prefix cache (where `enable_prefix_caching` is
    true) and a KV manager.
    """
    defaults = {"model": "none", "max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 256}
    config = EngineConfig(**{**defaults, "block_size": attention.block_size, **settings})
    model = ModelSpec(
        "test", "fingerprint", VOCAB_SIZE, config.max_model_len or 256, frozenset({0}), attention
    )
    caching = config.enable_prefix_caching
    cache = HashPrefixCache(config.block_size, model.fingerprint) if caching else NoPrefixCache()
    manager = PagedKVManager(num_blocks, config.block_size, cache, attention.reach)
    context = BuildContext(config, model).with_num_blocks(num_blocks)
    context = context.with_parking(make_parking(config, config.swap_space_bytes))
    context = context.with_draft_model_factory(lambda: CountingDraftModel(VOCAB_SIZE))
    context = context.with_draft_head_factory(lambda: CountingDraftHead(VOCAB_SIZE))
    return context.with_prefix_cache(cache).with_kv_manager(manager)
