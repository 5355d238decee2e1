"""Who hears what became of a plan."""

from __future__ import annotations

from conch.api.seams import Scheduler, StepObserver
from conch.api.steps import StepPlan, StepResult


class NoObserver:
    """Stands for a scheduler that does not learn from its steps."""

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Do nothing."""


def observer_of(scheduler: Scheduler) -> StepObserver:
    """Return the scheduler where it wants to hear, else nobody."""
    return scheduler if isinstance(scheduler, StepObserver) else NoObserver()
