"""What a plan is made within, and from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conch.api.config import EngineConfig
from conch.api.context import BuildContext
from conch.api.model_spec import ModelSpec
from conch.api.parking import Parking
from conch.api.prefix_caching import PrefixCache
from conch.api.request import Request
from conch.api.seams import KVManager
from conch.api.victims import VictimPolicy, make_victim_policy

ALL = 1 << 62
"""More blocks than there are."""

Spare = Callable[[Sequence[Request]], Sequence[Request]]
"""Of those who run, picks whom the scheduler would let go; at least one."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What bounds every plan.

    Attributes
    ----------
    max_tokens
        Token budget of the step.
    max_seats
        Requests that may run at once.
    split_prompts
        Whether an admission may pay only a part of what is owed.
    watermark
        Blocks that stay free when a request is admitted beside others.
    most_blocks
        Blocks that a request holds at most at one time, however long it is.
    micro_batches
        Steps that are in flight at once: each takes its share of those who run, so that all have some.
    """

    max_tokens: int
    max_seats: int
    split_prompts: bool = True
    watermark: int = 0
    most_blocks: int = ALL
    micro_batches: int = 1

    @classmethod
    def for_context(cls, context: BuildContext) -> PlanLimits:
        """Read the configuration.

        Without chunked prefill the budget is raised to the context length, so that every prompt fits whole.
        """
        config = context.config
        budget, split = config.max_num_batched_tokens, config.enable_chunked_prefill
        return cls(
            max_tokens=budget if split else max(budget, context.model.max_model_len),
            max_seats=config.max_num_seqs,
            split_prompts=split,
            watermark=int(config.kv_watermark * context.kv_manager.num_blocks),
            most_blocks=most_blocks(config, context.model),
            micro_batches=config.pipeline_parallel_size,
        )


def most_blocks(config: EngineConfig, model: ModelSpec) -> int:
    """Return what a request holds at most at one time: for a chunk of a prompt, and the window before it."""
    reach = model.attention.reach
    if reach is None or not config.enable_chunked_prefill:
        return ALL
    return -(-(reach + config.max_num_batched_tokens) // config.block_size) + 1


@dataclass(frozen=True, slots=True)
class KVParts:
    """Where blocks come from and where they go.

    Attributes
    ----------
    manager, cache
        The plugins in force.
    parking
        Where preempted requests leave their KV.
    victims
        Chooses who is preempted.
    """

    manager: KVManager
    cache: PrefixCache
    parking: Parking
    victims: VictimPolicy

    @classmethod
    def for_context(cls, context: BuildContext) -> KVParts:
        """Take the parts in force."""
        manager, parking = context.kv_manager, context.parking
        victims = make_victim_policy(context.config, manager, parking)
        return cls(manager, context.prefix_cache, parking, victims)
