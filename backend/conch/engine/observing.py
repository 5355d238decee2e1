"""Who hears what became of a plan, and who tells more than all do."""

from __future__ import annotations

from conch.api.experts import NO_EXPERTS, CountsExperts, ExpertLoad
from conch.api.seams import Parallelism, Scheduler, StepObserver
from conch.api.steps import StepPlan, StepResult


class NoObserver:
    """Stands for a scheduler that does not learn from its steps."""

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Do nothing."""


def observer_of(scheduler: Scheduler) -> StepObserver:
    """Return the scheduler where it wants to hear, else nobody."""
    return scheduler if isinstance(scheduler, StepObserver) else NoObserver()


class NoExperts:
    """Stands for a parallelism that counts none."""

    def expert_load(self) -> ExpertLoad:
        """Return nothing."""
        return NO_EXPERTS


def experts_of(parallelism: Parallelism) -> CountsExperts:
    """Return the parallelism where it counts experts, else nobody."""
    return parallelism if isinstance(parallelism, CountsExperts) else NoExperts()
