"""What a request asks of the sampler, with the names and defaults of vLLM's SamplingParams."""

from __future__ import annotations

import math

import msgspec

from conch.api.errors import RequestError

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: the distribution is a point mass to float precision."""

MAX_TEMPERATURE = 100.0
MAX_STOPS = 64
MAX_LOGPROBS = 20
MAX_CHOICES = 128
SEED_LIMIT = 1 << 63


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings of one request, validated whole.

    Attributes
    ----------
    n
        Choices to generate from one prompt.
    temperature
        0 is greedy.
    top_k
        Keep the k likeliest tokens; 0 and -1 keep all.
    top_p
        Keep the smallest set of likeliest tokens whose probability reaches p. 0 keeps one token.
    min_p
        Keep tokens at least this likely relative to the likeliest.
    repetition_penalty
        Divides positive and multiplies negative logits of tokens seen in prompt or output.
    presence_penalty, frequency_penalty
        Subtracted once, and once per occurrence, for tokens seen in the output.
    seed
        Makes the draw reproducible whatever else runs; None draws a fresh one.
    stop
        Strings that end the output; not part of it unless `include_stop_str_in_output`.
    stop_token_ids
        Token ids that end the output, besides the model's own.
    min_tokens, max_tokens
        Bounds on generated tokens; the context bounds them too. The default is vLLM's, 16.
    logprobs
        Report the log-probability of each token and of this many likeliest; None reports nothing.
        They are those of the model itself, before temperature, penalties and filters.
    logit_bias
        Token id to a value in [-100, 100] added to its logit; -100 bans it, 100 forces it.
    num_speculative_tokens
        Most tokens drafted ahead in one step, where the engine drafts and allows as many; 0 is none, None as
        many as the engine allows.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int = 16
    logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    skip_special_tokens: bool = True
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range, naming the key and the limit."""
        for key, low, high in _CLOSED_RANGES:
            value = getattr(self, key)
            if value is not None and not low <= value <= high:  # NaN fails too
                raise RequestError(f"must be in [{low}, {high}], not {value}", field=key)
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise RequestError(
                f"must be finite and greater than 0, not {self.repetition_penalty}",
                field="repetition_penalty",
            )
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}", field="min_tokens"
            )
        if len(self.stop) > MAX_STOPS or any(not text for text in self.stop):
            raise RequestError(f"must be at most {MAX_STOPS} strings, none of them empty", field="stop")
        for bias in self.logit_bias.values():
            if not -100 <= bias <= 100:
                raise RequestError(f"values must be in [-100, 100], not {bias}", field="logit_bias")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken outright."""
        return self.temperature < GREEDY_BELOW

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids outside the vocabulary.

        Raises
        ------
        RequestError
            An id in `stop_token_ids` or `logit_bias` is not in ``[0, vocab_size)``.
        """
        for field, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise RequestError(
                        f"token id {token_id} is outside the vocabulary [0, {vocab_size})", field=field
                    )


_CLOSED_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, MAX_CHOICES),
    ("temperature", 0.0, MAX_TEMPERATURE),
    ("top_k", -1, math.inf),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("seed", -SEED_LIMIT, SEED_LIMIT - 1),
    ("min_tokens", 0, math.inf),
    ("max_tokens", 1, math.inf),
    ("logprobs", 0, MAX_LOGPROBS),
    ("num_speculative_tokens", 0, math.inf),
)
