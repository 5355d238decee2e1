"""The worker that ends a pipeline."""

from __future__ import annotations

import msgspec

from conch.api import Arena, StepPlan, StepResult, Worker
from conch.api.experts import NO_EXPERTS, CountsExperts, ExpertLoad
from conch.model.mesh.handover import StageClock


class LastStage:
    """Tells with each step how long every stage has computed for it: `conch.api.Worker` around another.

    Parameters
    ----------
    worker
        Does the steps.
    clock
        Of its stage.
    """

    def __init__(self, worker: Worker, clock: StageClock) -> None:
        self._worker, self._clock = worker, clock

    @property
    def num_blocks(self) -> int:
        """KV blocks in the pool."""
        return self._worker.num_blocks

    def num_slots(self, arena: Arena) -> int:
        """Blocks that another arena holds."""
        return self._worker.num_slots(arena)

    def expert_load(self) -> ExpertLoad:
        """Return what the experts of the model had to do."""
        return self._worker.expert_load() if isinstance(self._worker, CountsExperts) else NO_EXPERTS

    def execute(self, plan: StepPlan) -> StepResult:
        """Do the step."""
        self._clock.begin()
        result = self._worker.execute(plan)
        return msgspec.structs.replace(result, stages_s=self._clock.read())

    def close(self) -> None:
        """Free the device."""
        self._worker.close()
