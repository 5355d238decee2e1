"""Experts divided among ranks: where they may move, and how much they have to do."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from conch.api.errors import ConfigError


class EPLBConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How experts follow the load, with vLLM's names. They move between two steps, one layer at a time.

    Attributes
    ----------
    num_redundant_experts
        Experts that each layer holds twice: those with the most to do, which then share it. Their weights
        take memory like any other's.
    step_interval
        Steps after which the load is looked at again.
    window_size
        Steps over which load is remembered: one so many steps ago counts a third of one now.
    """

    num_redundant_experts: int = 0
    step_interval: int = 3000
    window_size: int = 1000

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.num_redundant_experts < 0:
            raise ConfigError(f"num_redundant_experts must be 0 or more, not {self.num_redundant_experts}")
        for key in ("step_interval", "window_size"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key} must be greater than 0, not {getattr(self, key)}")


class ExpertLoad(msgspec.Struct, frozen=True, array_like=True):
    """What experts had to do since the engine started.

    Attributes
    ----------
    layers
        Numbers of the layers that have experts.
    tokens
        For each of them, the tokens that went to each of its experts.
    imbalance
        Tokens of the busiest rank over the mean of all ranks that share the experts, lately, as the mean over
        the layers; 1 is even, 0 is nothing to say.
    """

    layers: tuple[int, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()
    imbalance: float = 0.0


NO_EXPERTS = ExpertLoad()


@runtime_checkable
class CountsExperts(Protocol):
    """What a worker or a parallelism may do besides: tell the load of experts."""

    def expert_load(self) -> ExpertLoad:
        """Return what they had to do so far; `NO_EXPERTS` where there are none."""
