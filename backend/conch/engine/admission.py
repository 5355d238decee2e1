"""From a host's message to a request that the engine can keep its promises to."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

from conch.api.errors import ErrorCode, RequestError
from conch.api.request import Request
from conch.engine.protocol import AddRequest

_SEED_BITS = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds every request.

    Attributes
    ----------
    max_model_len
        Tokens of prompt and output together that the model can handle.
    pool_tokens
        Tokens that the whole KV pool holds. A request that needs more could never run.
    max_num_seqs
        Requests that may run at once.
    max_queue_size
        Requests that may wait for a seat.
    queue_timeout_s
        Seconds that a request may wait for its first step; None is for ever.
    vocab_size
        Token ids are in ``[0, vocab_size)``.
    eos_token_ids
        Ids that end an answer.
    ttft_target_s, tpot_target_s
        Targets of requests that state none; None for no target.
    held_tokens
        Tokens whose KV a request holds at most; None for all. It is bounded where every layer has a window.
    """

    max_model_len: int
    pool_tokens: int
    max_num_seqs: int
    max_queue_size: int
    queue_timeout_s: float | None
    vocab_size: int
    eos_token_ids: frozenset[int]
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    held_tokens: int | None = None

    @property
    def max_tokens(self) -> int:
        """Prompt and output of one request together."""
        return min(self.max_model_len, self.pool_tokens)


class Admission:
    """Checks messages against the limits and builds requests.

    Parameters
    ----------
    limits
        What bounds every request.
    seed
        Where the seeds of unseeded requests come from; None is the operating system.
    """

    def __init__(self, limits: Limits, seed: int | None) -> None:
        self._limits = limits
        self._random = random.Random(seed)
        self._next_id = 0

    def build(self, message: AddRequest, num_waiting: int, seats_left: int) -> Request:
        """Return the request of a message, its first choice, with the others pending.

        Raises
        ------
        RequestError
            It can never be served within the limits, or the queue is full.
        """
        self._check_prompt(message.token_ids)
        params = message.params
        params.check_vocabulary(self._limits.vocab_size)
        if params.n > self._limits.max_num_seqs:
            raise RequestError(
                f"must be at most max_num_seqs ({self._limits.max_num_seqs}), not {params.n}", field="n"
            )
        if num_waiting >= self._limits.max_queue_size + max(0, seats_left):
            raise RequestError(
                f"the queue is full: {num_waiting} requests wait and max_queue_size is "
                f"{self._limits.max_queue_size}; try again later",
                ErrorCode.UNAVAILABLE,
            )
        num_prompt = len(message.token_ids)
        now = time.monotonic()
        return Request(
            id=self.new_id(),
            token_ids=list(message.token_ids),
            num_prompt=num_prompt,
            params=params,
            seed=self._seed(params.seed),
            limit=min(num_prompt + params.max_tokens, self._limits.max_tokens),
            priority=message.priority,
            cache_salt=message.cache_salt,
            tenant=message.cache_salt if message.tenant is None else message.tenant,
            ttft_target_s=_or_default(message.ttft_target_s, self._limits.ttft_target_s),
            tpot_target_s=_or_default(message.tpot_target_s, self._limits.tpot_target_s),
            arrival_s=now,
            deadline_s=now + (math.inf if message.timeout_s is None else message.timeout_s),
            queue_deadline_s=now
            + (math.inf if self._limits.queue_timeout_s is None else self._limits.queue_timeout_s),
            pending_forks=tuple(range(1, params.n)),
        )

    def fork(self, parent: Request, choice: int) -> Request:
        """Return a further choice of a request whose prompt is computed.

        It starts one token short of the prompt's end: the last prompt token is computed again, in its own
        copy of the last block, and yields the logits that its first token is drawn from.
        """
        return Request(
            id=self.new_id(),
            token_ids=parent.token_ids[: parent.num_prompt],
            num_prompt=parent.num_prompt,
            params=parent.params,
            seed=(parent.seed + choice) % (1 << _SEED_BITS),
            limit=parent.limit,
            priority=parent.priority,
            cache_salt=parent.cache_salt,
            tenant=parent.tenant,
            ttft_target_s=parent.ttft_target_s,
            tpot_target_s=parent.tpot_target_s,
            arrival_s=parent.arrival_s,
            deadline_s=parent.deadline_s,
            first_scheduled_s=parent.first_scheduled_s,
            num_computed=parent.num_prompt - 1,
            num_cached=parent.num_cached,
        )

    def new_id(self) -> int:
        """Return an id that was never used."""
        self._next_id += 1
        return self._next_id

    def _seed(self, wanted: int | None) -> int:
        if wanted is None:
            return self._random.getrandbits(_SEED_BITS)
        return wanted % (1 << _SEED_BITS)

    def _check_prompt(self, token_ids: tuple[int, ...]) -> None:
        limits, count = self._limits, len(token_ids)
        if count == 0:
            raise RequestError("the prompt has no tokens", field="prompt")
        if count >= limits.max_model_len:
            raise RequestError(
                f"the prompt has {count} tokens and the context is {limits.max_model_len} tokens; at least "
                "one must be left for output",
                field="prompt",
            )
        if count >= limits.pool_tokens:
            raise RequestError(
                f"the prompt has {count} tokens and the whole KV pool holds {limits.pool_tokens}; at least "
                "one must be left for output. A larger pool (kv_cache_memory_bytes) would take it",
                field="prompt",
            )
        outside = next((t for t in token_ids if not 0 <= t < limits.vocab_size), None)
        if outside is not None:
            raise RequestError(
                f"token id {outside} is outside the vocabulary [0, {limits.vocab_size})", field="prompt"
            )


def _or_default(wanted: float | None, default: float | None) -> float | None:
    return default if wanted is None else wanted
