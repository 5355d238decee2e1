"""RoPE whose frequencies depend on sequence length, pinned.

transformers picks the frequencies of ``longrope`` and ``dynamic`` in each forward pass by the largest
position in it. In a packed batch that would make a row depend on its neighbours, and leave keys of two
frequencies in one cache. So they are chosen once, by `max_model_len`.
"""

from __future__ import annotations

from typing import Any

import torch

_PINNED = "pinned"


def pin_rope(model: torch.nn.Module, max_model_len: int) -> None:
    """Fix the frequencies of every rotary module for contexts up to `max_model_len`.

    ``longrope`` gets its long factors where `max_model_len` exceeds the original context, else its short
    ones. ``dynamic`` keeps its original frequencies: it is never served beyond the context that they are for.
    """
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        if kind == "longrope":
            _pin_longrope(module, max_model_len)
        if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind):
            module.rope_type = _PINNED  # type: ignore[assignment]


def _pin_longrope(module: Any, max_model_len: int) -> None:  # noqa: ANN401 - transformers is not typed
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    original = module.config.rope_parameters["original_max_position_embeddings"]
    if max_model_len > original:
        device = module.inv_freq.device
        frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, device, seq_len=original + 1)
        module.inv_freq.copy_(frequencies)
