"""The key `speculative_config`: who drafts, how much, and when not to."""

from __future__ import annotations

from typing import Literal

import msgspec

from conch.api.errors import ConfigError

DRAFT_MODEL = "draft_model"
EAGLE = "eagle"
SUFFIX = "suffix"
MAX_SPECULATIVE_TOKENS = 64
_DEFAULT_SPECULATIVE_TOKENS = 5
_DEFAULT_LOOKUP = 5


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drafted. Names are vLLM's where they mean the same; `backoff` is ours.

    Attributes
    ----------
    method
        Name of a drafter: ``ngram``, ``suffix``, ``draft_model``, ``eagle``, or that of a plugin. None is
        ``draft_model`` where a `model` is given.
    model
        Checkpoint of the draft model, found as the engine's own `model` is; its vocabulary is the target's.
        For ``eagle`` the folder of a head made for the target: EAGLE-1, EAGLE-2 or EAGLE-3, in safetensors.
    quantization
        Of the draft model's weights; as the engine's key of that name.
    max_model_len
        Context of the draft model, where it is to be shorter than the draft model's own and the target's.
    num_speculative_tokens
        Most tokens drafted ahead in one step, up to 64. None is 5, and for ``suffix`` its tree depth.
    num_speculative_tokens_per_batch_size
        ``[[low, high, k], ...]``: while from `low` to `high` requests decode, at most k tokens are drafted
        for each; outside of all ranges `num_speculative_tokens` holds.
    backoff
        Whether drafting is cut back, to nothing if need be, where measured acceptance and step times say
        that it loses.
    prompt_lookup_min, prompt_lookup_max
        Fewest and most tokens that ``ngram`` matches. One alone stands for both; none is 5 for both.
    suffix_decoding_max_tree_depth
        Most tokens that ``suffix`` matches.
    suffix_decoding_max_cached_requests
        Ended requests whose output ``suffix`` remembers; 0 for none.
    suffix_decoding_max_spec_factor
        ``suffix`` drafts at most this many times as many tokens as it has matched.
    suffix_decoding_min_token_prob
        ``suffix`` stops where what it has seen makes its draft less likely than this.
    """

    method: str | None = None
    model: str | None = None
    quantization: Literal["int8", "gguf"] | None = None
    max_model_len: int | None = None
    num_speculative_tokens: int | None = None
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    backoff: bool = True
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    def __post_init__(self) -> None:
        """Refuse what does not fit, naming the key."""
        if self.method is None and self.model is None:
            raise ConfigError("speculative_config needs a method (or a model, to draft with it)")
        if self.name in (DRAFT_MODEL, EAGLE) and self.model is None:
            raise ConfigError(f"speculative_config: method {self.name!r} needs a model")
        if self.name == EAGLE and (self.quantization or self.max_model_len):
            key = "quantization" if self.quantization else "max_model_len"
            raise ConfigError(
                f"speculative_config.{key} is not for method {EAGLE!r}: a head has none of its own"
            )
        for key in _AT_LEAST_1:
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"speculative_config.{key} must be at least 1, not {value}")
        if self.num_tokens > MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"speculative_config.num_speculative_tokens must be at most {MAX_SPECULATIVE_TOKENS}, "
                f"not {self.num_tokens}"
            )
        if self.suffix_decoding_max_cached_requests < 0:
            raise ConfigError("speculative_config.suffix_decoding_max_cached_requests must be 0 or more")
        if not self.suffix_decoding_max_spec_factor > 0:
            raise ConfigError("speculative_config.suffix_decoding_max_spec_factor must be greater than 0")
        if not 0 <= self.suffix_decoding_min_token_prob <= 1:
            raise ConfigError("speculative_config.suffix_decoding_min_token_prob must be in [0, 1]")
        shortest, longest = self.prompt_lookup
        if shortest > longest:
            raise ConfigError(
                f"speculative_config.prompt_lookup_min ({shortest}) must be at most "
                f"prompt_lookup_max ({longest})"
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        end = 0
        for low, high, count in self.num_speculative_tokens_per_batch_size:
            if not (end < low <= high and 0 <= count <= self.num_tokens):
                raise ConfigError(
                    "speculative_config.num_speculative_tokens_per_batch_size must be rising ranges of batch "
                    f"sizes [low, high, k] with k in [0, {self.num_tokens}]; [{low}, {high}, {count}] is not"
                )
            end = high

    @property
    def name(self) -> str:
        """Name of the drafter."""
        return self.method or DRAFT_MODEL

    @property
    def num_tokens(self) -> int:
        """Most tokens drafted ahead in one step."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        depth = self.suffix_decoding_max_tree_depth
        return depth if self.name == SUFFIX else _DEFAULT_SPECULATIVE_TOKENS

    @property
    def prompt_lookup(self) -> tuple[int, int]:
        """Fewest and most tokens that are matched."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        longest = high or low or _DEFAULT_LOOKUP
        return low or longest, longest

    def most_at(self, batch_size: int) -> int:
        """Most tokens drafted for each of so many requests."""
        for low, high, count in self.num_speculative_tokens_per_batch_size:
            if low <= batch_size <= high:
                return count
        return self.num_tokens


_AT_LEAST_1 = (
    "max_model_len",
    "num_speculative_tokens",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "suffix_decoding_max_tree_depth",
)
