"""Every drafter on the tiny model, those of extremes among them; none backs off."""

from __future__ import annotations

from conch.api import SpeculativeConfig
from support.eagle import eagle3_config, eagle3_tensors, write_head
from support.tiny import tiny_checkpoint


def target() -> str:
    """Return the model that all of them draft for."""
    return str(tiny_checkpoint("llama"))


def drafters() -> dict[str, SpeculativeConfig]:
    """Return them by name: `itself` and `short` are always right, `random` and `eagle` hardly ever."""
    random_model = str(tiny_checkpoint("llama", seed=9, num_hidden_layers=1))
    head = str(write_head(eagle3_tensors(), eagle3_config()))
    return {
        "ngram": SpeculativeConfig(method="ngram", prompt_lookup_min=1, prompt_lookup_max=4, backoff=False),
        "suffix": SpeculativeConfig(method="suffix", backoff=False),
        "itself": SpeculativeConfig(model=target(), num_speculative_tokens=4, backoff=False),
        "random": SpeculativeConfig(model=random_model, num_speculative_tokens=3, backoff=False),
        "short": SpeculativeConfig(model=target(), max_model_len=64, num_speculative_tokens=8, backoff=False),
        "eagle": SpeculativeConfig(method="eagle", model=head, num_speculative_tokens=3, backoff=False),
    }


DRAFTERS = tuple(drafters())
KNOWING = ("ngram", "suffix", "itself", "short")
"""Those that are right at times."""
