"""The eight seams: what each kind of plugin must do. Hot loops hold these objects, not hooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from conch.api.batch import AttentionLayer, StepBatch
from conch.api.drafting import DraftContext
from conch.api.model_spec import AttentionSpec
from conch.api.request import Requests
from conch.api.steps import Arena, Move, StepPlan, StepResult

if TYPE_CHECKING:
    import torch


@runtime_checkable
class Scheduler(Protocol):
    """Decides who computes how many tokens in the next step."""

    def plan(self, requests: Requests) -> StepPlan | None:
        """Plan one step, or return None when nothing can be done now.

        Promises: every row is of a request in `requests`, at most one row each; the blocks that a row
        needs are held when the plan is returned; a preempted request has no row and holds no blocks; and
        while no step is in flight and any request is owed tokens, a plan is returned (progress). The
        requests themselves are not written to: the engine applies the plan. `conch.api.planning.PlanBuilder`
        keeps all of these for a scheduler that uses it.
        """


@runtime_checkable
class StepObserver(Protocol):
    """What a scheduler may do besides: hear what became of its plans."""

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Take note of a step that has been computed, before its tokens are committed.

        `seconds` is what the step has added to the time of every request in it: planning and computing.
        """


class BlockUpdate(msgspec.Struct, frozen=True, gc=False):
    """How a block table changed: entries from `start` on are now `blocks`.

    `moves` are made in order before the step writes to any block; the plan lists those of all updates in the
    order in which the updates were made, so a move may take a block out of the way of a later one.
    """

    start: int
    blocks: tuple[int, ...]
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True)
class ReleaseEffect:
    """What it would bring to release a request's blocks, and what of its KV would outlast that.

    Attributes
    ----------
    num_freed
        Blocks that nobody else holds.
    num_kept
        Its leading tokens whose KV others hold and the prefix cache knows: they would be found again.
    """

    num_freed: int
    num_kept: int


@runtime_checkable
class KVManager(Protocol):
    """Owns the KV blocks: who holds which, and how many references each has.

    The only writer of block tables and reference counts. Blocks whose content the prefix cache keeps
    stay evictable after their last user leaves, and count as free.
    """

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allotted now, evictable ones included."""

    def adopt(self, request_id: int, blocks: Sequence[int]) -> None:
        """Begin a table with shared `blocks`, those of a `Match` (empty for none).

        A manager that gives blocks up gets them back here as `NO_BLOCK`, after a swap.
        """

    def grow(self, request_id: int, start: int, end: int) -> BlockUpdate | None:
        """Make room for tokens ``[start, end)`` and make their blocks safe to write.

        A block in that range which others hold too, or which the prefix cache holds, is replaced by a copy
        of its own (copy-on-write), by `BlockUpdate.moves`.
        Returns None, with nothing changed, when there are not enough free blocks. A request unknown so far
        begins with an empty table. No call that follows starts before `start`, so blocks that tokens from
        `start` on cannot see may be given up (see `blocks`), which no update tells.
        """

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Give the child the parent's blocks that cover its first `num_tokens` tokens, shared."""

    def release(self, request_id: int) -> None:
        """Drop every reference of a request; unknown ids are ignored, so it is safe to repeat."""

    def release_effect(self, request_id: int) -> ReleaseEffect:
        """Foretell a release, for the choice of a victim; changes nothing.

        ``ReleaseEffect(len(self.blocks(request_id)), 0)`` will do where blocks are not shared.
        """

    def blocks(self, request_id: int) -> Sequence[int]:
        """Block table of a request, in order of position.

        `NO_BLOCK` stands for a block that the manager gave up because it has fallen wholly behind the window
        of every layer: nobody reads it again. What is given up is always the beginning of a table.
        """

    def check_integrity(self) -> None:
        """Raise AssertionError when a block is leaked, lost, or free while referenced."""


@runtime_checkable
class AttentionKernel(Protocol):
    """Paged attention over packed rows."""

    @staticmethod
    def unfit(spec: AttentionSpec) -> list[str]:
        """Reasons why this kernel cannot serve the model, in words; empty when it can."""

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's pool in the kernel's layout, ``[2, N, ...]``, of the spec's `pool_dtype`.

        All of a block lies under its number, scales too where the dtype needs any: blocks are copied whole.
        """

    def plan(self, batch: StepBatch) -> Any:  # noqa: ANN401 - the kernel's own, opaque to all others
        """Do once what every layer of the step shares."""

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: AttentionLayer,
        plan: Any,  # noqa: ANN401
    ) -> torch.Tensor:
        """Write key and value into the pool and attend.

        Only what a row's own tokens have written may count. All else in the pool, in a row's last block too,
        may be NaN: the request that left it failed, and must not take another one with it.

        Parameters
        ----------
        query : [T, H, D]
        key : [T, K, D]
        value : [T, K, D]
        layer
            Pool and constants of this layer.
        plan
            What `plan` returned for this step.

        Returns
        -------
        [T, H, D]
            Contiguous, of the dtype of `query` (D of the values).
        """


@runtime_checkable
class Drafter(Protocol):
    """Guesses the tokens that come next.

    A guess may be drawn at random by `conch.api.DraftModel.draw` only: the tokens of a seeded request, and
    how often drafts are accepted, depend on the distribution that it was drawn from.
    """

    def propose(self, context: DraftContext) -> list[tuple[int, ...]]:
        """Guess for each row of `context`, in its order, at most ``room`` tokens; empty is fine.

        A drafter may stop before a token, for whatever reason, but not because of the token: what it has
        drawn it must not take back.
        """

    def forget(self, request_ids: Sequence[int]) -> None:
        """Drop state kept for requests that ended."""


@runtime_checkable
class Worker(Protocol):
    """One rank: holds a shard of the model and of the KV pool."""

    @property
    def num_blocks(self) -> int:
        """KV blocks in this rank's pool."""

    def num_slots(self, arena: Arena) -> int:
        """Blocks that another arena of this rank holds; 0 where it has none."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Do the step."""

    def close(self) -> None:
        """Free the device."""


@runtime_checkable
class Parallelism(Protocol):
    """Runs plans on one or many ranks."""

    @property
    def depth(self) -> int:
        """Steps that may be in flight at once."""

    @property
    def num_blocks(self) -> int:
        """KV blocks that every rank has."""

    def num_slots(self, arena: Arena) -> int:
        """Blocks that every rank has in another arena; 0 where any has none."""

    def submit(self, plan: StepPlan) -> int:
        """Start a step; returns a ticket. Steps run in the order of submission."""

    def collect(self, ticket: int) -> StepResult:
        """Wait for a step. Tickets are collected in order, each once."""

    def close(self) -> None:
        """Stop all ranks; bounded in time."""


@runtime_checkable
class KVConnector(Protocol):
    """Moves KV between engines: what one offers, another pulls."""

    def offer(self, request_id: int, blocks: Sequence[int]) -> bytes | None:
        """Make blocks available to another engine; returns a handle to send it, None to decline."""

    def pull(self, handle: bytes, blocks: Sequence[int]) -> bool:
        """Fill local blocks from a handle; False where there is nothing to pull."""

    def release(self, request_id: int) -> None:
        """Withdraw an offer."""
