"""Which tokens a head can draft."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from conch.training.texts import Text


def choose_tokens(texts: Iterable[Text], vocab_size: int, size: int) -> torch.Tensor:
    """Return the `size` tokens that the target has written most often, in order: int64 [size]."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for text in texts:
        counts += torch.bincount(torch.tensor(text.token_ids), minlength=vocab_size)
        counts += torch.bincount(torch.tensor(text.token_ids[text.num_prompt :]), minlength=vocab_size)
    chosen = counts.argsort(descending=True, stable=True)[:size]
    return chosen.sort().values
