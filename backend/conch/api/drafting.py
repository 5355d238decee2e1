"""What passes between a worker and its drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from conch.api.steps import Row

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``[start, end)`` of a request, whose KV the target has computed in this step.

    Rejected drafts are left out. `began` is where the request's first step began: the KV before it was there
    already (from the prefix cache, say), and so was a second model's as far as that had computed it.
    """

    request_id: int
    start: int
    end: int
    began: int


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter may look at after a step.

    Attributes
    ----------
    request_ids
        Rows that sampled in this step.
    token_ids
        For each, all its tokens, the new ones included. ``numpy.asarray`` of one makes no copy.
    room
        For each, how many drafts are of use at most: before its limit, and as many as are worth it.
    spans
        What the step has computed, for each request that may draft now or later: also for prompts that are
        not done yet, and not for requests that have drafting switched off.
    """

    request_ids: Sequence[int]
    token_ids: Sequence[Sequence[int]]
    room: Sequence[int]
    spans: Sequence[Span] = ()


class DraftModel(Protocol):
    """A second model beside the target, for drafters; the worker owns it.

    Its KV has the target's block numbers: where a request has a block, it has room for the draft model's KV
    of the same tokens, and what copies, shares or moves the block takes that along. Drafts that are ahead of
    a request's blocks are kept in scratch blocks, which the next step writes over.
    """

    @property
    def max_model_len(self) -> int:
        """Tokens that it can see; may be fewer than the target's."""

    @property
    def max_num_tokens(self) -> int:
        """Tokens that one call of `logits` should have at most."""

    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Compute rows and their KV; returns the logits of those that sample: float32 [L, V].

        Tokens are the request's own and those that `draw` has drawn for it in this step.
        """

    def first_held(self, start: int) -> int:
        """Return the first token whose block a request still has in a step that begins at `start`.

        0, unless the windows of all layers of the target leave tokens behind.
        """

    def draw(self, request_ids: Sequence[int], logits: torch.Tensor) -> list[int | None]:
        """Draw the next draft of each request as its own settings say; None where logits are not finite.

        Greedy requests get the likeliest token. For others the worker remembers the distribution: a draft
        that is returned from `propose` is verified against exactly what it was drawn from.
        """


class DraftHead(Protocol):
    """A head on the target's hidden states, for drafters; the worker owns it.

    Slot i of its KV lies where the target's KV of token i does. It is made of the target's states at token i,
    which are there only in the step that computes them, and of token i + 1. So a call computes what the spans
    of a step say; further calls in the same step go on with a slot for each request that sampled, made of
    what the head itself has put out and of the draft that was drawn.
    """

    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Compute slots of rows; returns the logits of the last of those that sample: float32 [L, V].

        Tokens that the head cannot draft have -inf.
        """

    def draw(self, request_ids: Sequence[int], logits: torch.Tensor) -> list[int | None]:
        """Draw the next draft of each request; see `DraftModel.draw`."""
