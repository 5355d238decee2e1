"""What flows through one step: plan, result, output. Frozen, without tensors, made for the wire."""

from __future__ import annotations

from enum import Enum, IntEnum

import msgspec

from conch.api.errors import ErrorCode
from conch.api.sampling import SamplingParams


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """A request in full, sent to the workers with its first row (and again after a preemption).

    Attributes
    ----------
    token_ids
        Prompt and output so far; tokens sampled later are known to the workers already.
    num_prompt
        Leading tokens that came from the client.
    seed
        Key of its random draws.
    limit
        `token_ids` never grows past this many: what bounds drafts.
    """

    request_id: int
    token_ids: tuple[int, ...]
    num_prompt: int
    params: SamplingParams
    seed: int
    limit: int


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The share of one request in one step.

    Attributes
    ----------
    start
        Position of the first token computed: KV of ``[0, start)`` is in place.
    count
        Tokens computed, drafts included.
    samples
        Whether the row reaches the last known token, so that a new one is sampled.
    drafts
        Guesses that follow the last known token; the last ``len(drafts)`` of the `count` tokens.
    blocks_from, blocks
        The row's block table changes from this index on: entries are appended, or replaced where a
        shared block was copied before writing.
    """

    request_id: int
    start: int
    count: int
    samples: bool
    drafts: tuple[int, ...]
    blocks_from: int
    blocks: tuple[int, ...]


NO_BLOCK = -1
"""In a block table: a block that has fallen behind the window of every layer and was given up."""


class Arena(IntEnum):
    """Where KV blocks lie, in one layout everywhere: each has slots, and each slot holds a block."""

    DEVICE = 0
    """The KV pool that attention reads."""
    HOST = 1
    """Memory of the host that holds cached blocks."""
    DISK = 2
    """A bounded file on the local disk that holds cached blocks."""
    SWAP = 3
    """Memory of the host where requests that were preempted leave their KV: see `conch.api.parking`."""


class Move(msgspec.Struct, frozen=True, array_like=True):
    """A whole block, copied from a slot to a slot; without arenas named, within the KV pool."""

    source: int
    target: int
    source_arena: Arena = Arena.DEVICE
    target_arena: Arena = Arena.DEVICE


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """What all ranks do in one step.

    Attributes
    ----------
    rows
        At most one for each request.
    admitted
        Requests that the workers do not know yet.
    cached
        For each admitted id, tokens that the prefix cache already holds.
    preempted, finished
        Requests that the workers forget before the step; ids that they do not know are ignored.
    kept
        For each preempted id whose KV is parked, the tokens that it keeps; all others begin again.
    moves
        Blocks copied before the step, one after the other: a later one sees what an earlier one wrote.
    """

    rows: tuple[Row, ...]
    admitted: tuple[Admission, ...] = ()
    cached: dict[int, int] = {}
    preempted: tuple[int, ...] = ()
    kept: dict[int, int] = {}
    finished: tuple[int, ...] = ()
    moves: tuple[Move, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step, over all rows."""
        return sum(row.count for row in self.rows)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: of the token taken, and of the likeliest."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A request ended by an error."""

    code: ErrorCode
    message: str


class RowResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one row brought.

    Attributes
    ----------
    token_ids
        Accepted drafts, then one token sampled; empty where the row does not sample.
    drafts
        Guesses for the request's next row.
    logprobs
        One entry for each of `token_ids` where the request asks for them, else None.
    failure
        Set where the row could not be computed (its logits are not numbers, say): ends that request only.
    """

    request_id: int
    token_ids: tuple[int, ...]
    drafts: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    failure: Failure | None = None


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What one step brought, a result for each row of the plan in its order.

    Attributes
    ----------
    drafting_s
        What drafting for the next step has taken.
    failed_moves
        Indices of the plan's moves whose targets hold nothing of use: a disk was full, say.
    stages_s
        Seconds that each stage of a pipeline has computed, not counting what it waited for the others; empty
        where there is none.
    """

    rows: tuple[RowResult, ...]
    drafting_s: float = 0.0
    failed_moves: tuple[int, ...] = ()
    stages_s: tuple[float, ...] = ()


class FinishReason(str, Enum):
    """Why an output ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Counts and times of a finished choice. Seconds are monotonic differences.

    Attributes
    ----------
    queue_s
        From arrival to the first step.
    ttft_s
        From arrival to the first token, None where there was none.
    total_s
        From arrival to the end.
    num_draft_tokens, num_accepted_tokens
        Drafted tokens that were verified, and those of them that were right.
    """

    num_prompt: int
    num_output: int
    num_cached: int
    num_preemptions: int
    queue_s: float
    ttft_s: float | None
    total_s: float
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class RequestOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """News of one choice: tokens since the last output, and how it ended if it did.

    Attributes
    ----------
    request_id
        The id that the client side chose for the request.
    choice
        Index in ``[0, n)``.
    finish_reason, usage
        Set together, with the last tokens.
    failure
        Set instead where the whole request failed; nothing follows for any choice.
    """

    request_id: int
    choice: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    failure: Failure | None = None
