"""What plugins may know of the model that is served. No tensors, no transformers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What an attention kernel must be able to do to serve a model.

    Letters as in `conch.api.batch`: H query heads, K KV heads, D head size.

    Attributes
    ----------
    num_heads, num_kv_heads, head_size
        H, K and D of queries and keys.
    value_head_size
        D of values; differs from `head_size` in latent-attention models.
    windows
        For each layer the sliding window in tokens, or None for full attention.
    softcap
        Whether any layer caps its scores with tanh.
    sinks
        Whether any layer has attention sinks.
    dtype, device
        As torch spells them, such as ``bfloat16`` and ``cpu``.
    block_size
        Tokens in one KV block.
    kv_cache_dtype
        What KV is kept as: ``int8``, or ``auto`` for `dtype`.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    value_head_size: int
    windows: tuple[int | None, ...]
    softcap: bool
    sinks: bool
    dtype: str
    device: str
    block_size: int
    kv_cache_dtype: str = "auto"

    @property
    def reach(self) -> int | None:
        """Tokens that a query sees in the layer that sees the most, itself included; None for all."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if windows and len(windows) == len(self.windows) else None

    @property
    def pool_dtype(self) -> str:
        """Of the KV pool's elements, as torch spells it."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The served model, as far as scheduling and memory are concerned.

    Attributes
    ----------
    name
        Architecture and size for people to read.
    fingerprint
        Identifies the weights; KV of different fingerprints is never shared.
    vocab_size
        Token ids are in ``[0, vocab_size)``.
    max_model_len
        Tokens of prompt and output together.
    eos_token_ids
        Every id that ends an answer, from the generation config.
    attention
        What the attention kernel must do.
    """

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    attention: AttentionSpec

    @property
    def num_layers(self) -> int:
        """Attention layers, each with a KV cache of its own."""
        return len(self.attention.windows)
