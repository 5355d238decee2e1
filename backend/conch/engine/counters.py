"""What the engine counts about itself."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from conch.api.request import Request
from conch.api.steps import Arena, Row, RowResult, StepPlan, StepResult


@dataclass(slots=True)
class Counters:
    """Totals since the engine started. The engine core is the only writer."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafts: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    accepted_by_position: tuple[int, ...] = ()
    drafting_s: float = 0.0
    steps_s: float = 0.0
    stages_s: tuple[float, ...] = ()

    def count_plan(self, plan: StepPlan, first_admissions: list[Request]) -> None:
        """Count a plan that was submitted; `first_admissions` are requests that run for the first time."""
        self.steps += 1
        self.computed_tokens += plan.num_tokens
        self.preemptions += len(plan.preempted)
        for move in plan.moves:
            self.blocks_swapped_out += move.target_arena is Arena.SWAP
            self.blocks_swapped_in += move.source_arena is Arena.SWAP
        for request in first_admissions:
            self.prompt_tokens += request.num_prompt
            self.prefix_queries += request.num_prompt
            self.prefix_hits += request.num_cached

    def count_times(self, result: StepResult, seconds: float) -> None:
        """Count what a step has taken that added `seconds` to the time of all requests."""
        self.steps_s += seconds
        self.drafting_s += result.drafting_s
        self.stages_s = tuple(map(sum, zip_longest(self.stages_s, result.stages_s, fillvalue=0.0)))

    def count_row(self, row: Row, brought: RowResult, kept: int) -> None:
        """Count a row that was committed, of whose new tokens `kept` were."""
        self.generation_tokens += kept
        if row.drafts:
            self._count_drafts(len(row.drafts), len(brought.token_ids) - 1)

    def _count_drafts(self, proposed: int, accepted: int) -> None:
        self.drafts += 1
        self.drafts_proposed += proposed
        self.drafts_accepted += accepted
        before = self.accepted_by_position
        padded = before + (0,) * (accepted - len(before))
        self.accepted_by_position = tuple(
            count + (position < accepted) for position, count in enumerate(padded)
        )
