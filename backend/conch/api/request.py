"""The request as the engine sees it: the only mutable type in the loop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from conch.api.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one client request, from its arrival to its last token.

    The engine core is the only writer; schedulers, caches and drafters read. The rule of
    progress: a request is owed ``num_tokens - num_computed`` tokens, and a scheduler pays some. There
    is no prefill or decode phase: chunked prefill, prefix hits, speculation and preemption are all
    cases of that rule.

    Attributes
    ----------
    id
        Unique in the engine's life; never reused.
    token_ids
        Prompt and output so far.
    num_prompt
        Leading tokens of `token_ids` that came from the client.
    params, seed
        Sampling settings, and the seed in force (the client's, or one drawn for it).
    limit
        `token_ids` never grows past this: prompt + max_tokens, bounded by context and KV pool.
    priority
        Lower is sooner, as in Triton; equal for all that do not say.
    cache_salt
        Requests of different salts never share cached KV.
    tenant
        On whose account it is; the client's `cache_salt` where it names none.
    ttft_target_s
        Seconds from its arrival within which its first token is wanted; None for no wish.
    tpot_target_s
        Seconds within which each further token is wanted; None for no wish.
    arrival_s
        Monotonic seconds of its arrival.
    deadline_s
        Monotonic seconds after which it is given up, running or not; ``inf`` for never.
    queue_deadline_s
        Monotonic seconds by which its first step must have begun; ``inf`` for never.
    num_computed
        Leading tokens whose KV is in place once the steps in flight are done.
    num_cached
        Prompt tokens that the prefix cache gave at its first admission.
    num_drafted, num_accepted
        Guesses that were verified, and those of them that were right.
    drafts
        Guesses at the tokens after `token_ids`, to be verified by its next row.
    pending_forks
        Further choices to fork off once the prompt is computed; each reserves a seat.
    is_known
        Whether the workers hold its tokens and block table.
    num_at_admission
        Tokens that it had when it was last admitted.
    """

    id: int
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    limit: int
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    arrival_s: float = 0.0
    deadline_s: float = math.inf
    queue_deadline_s: float = math.inf
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    num_computed: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafts: tuple[int, ...] = ()
    pending_forks: tuple[int, ...] = ()
    is_known: bool = False
    num_at_admission: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.token_ids)

    @property
    def owed(self) -> int:
        """Tokens whose KV is still to be computed; 0 while its last one is being sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def has_advanced(self) -> bool:
        """Whether it has brought a token since it was last admitted."""
        return len(self.token_ids) > self.num_at_admission

    @property
    def seats(self) -> int:
        """Places among the running that it takes: itself, and the choices it will fork."""
        return 1 + len(self.pending_forks)


class Requests(Protocol):
    """The live requests, as a scheduler sees them."""

    @property
    def waiting(self) -> Iterable[Request]:
        """Requests without KV: those preempted, the last victim first; then others in order of arrival."""

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold KV and may be planned for, in order of admission."""

    @property
    def in_flight(self) -> Sequence[Request]:
        """Others that hold KV: a step under way samples for them. They have seats, and are left alone."""

    @property
    def finished(self) -> Sequence[int]:
        """Ids that ended since the last plan: the workers may forget them."""

    @property
    def arrived(self) -> Iterable[Request]:
        """Requests that came to wait since the last plan: with `departed`, all that an index needs."""

    @property
    def departed(self) -> Sequence[int]:
        """Ids that ended while they waited since the last plan, of those that arrived since then, too."""
