"""A mesh whose ranks are threads of one process, so that each can be asked what it has told the others."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from conch.api import AttentionKernel, BuildContext, EngineConfig, ModelSpec, StepPlan
from conch.api.mesh import RankOrder, Seat
from conch.api.mesh_config import shape_of
from conch.engine.mesh.meeting import Meeting
from conch.model.mesh.holding import holdings
from conch.model.mesh.traffic import Traffic
from conch.worker import FollowingWorker, InMesh, prepare
from conch_plugins.attention.torch_paged import TorchPagedAttention

_TIMEOUT_S = 60.0


class ThreadedMesh:
    """Ranks that compute steps over real sockets; none of them samples. A context manager.

    Parameters
    ----------
    config
        With the sizes of the mesh, in fp32: torch's default dtype is one for all threads.
    """

    def __init__(self, config: EngineConfig) -> None:
        assert config.dtype == "float32"
        self._config = config
        self._prepared = prepare(config, _ignore)
        self.shape = shape_of(config)
        self._meeting = Meeting("127.0.0.1")
        self._threads = ThreadPoolExecutor(self.shape.size)

    def __enter__(self) -> ThreadedMesh:
        """Load all ranks."""
        seats = [Seat(rank, self.shape, _TIMEOUT_S) for rank in range(self.shape.size)]
        self._ranks = list(self._threads.map(self._join, seats))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all ranks."""
        for _, worker in self._ranks:
            worker.close()
        self._threads.shutdown()

    def execute(self, order: RankOrder) -> None:
        """Do a step on all ranks."""
        list(self._threads.map(lambda rank: rank[1].execute(order), self._ranks))

    def said(self) -> list[Traffic]:
        """Return what each rank has put into collectives, warming up included."""
        return [place.traffic for place, _ in self._ranks]

    def predicted(self, plans: Sequence[StepPlan]) -> list[Traffic]:
        """Return what each rank puts into collectives for some steps, by the formula."""
        found = holdings(self._prepared.description, self._config)
        totals = []
        for one in found:
            total = Traffic()
            for plan in plans:
                logits = sum(1 + len(row.drafts) for row in plan.rows if row.samples)
                total += one.speech.of_step(plan.num_tokens, logits)
            totals.append(total)
        return totals

    def _join(self, seat: Seat) -> tuple[InMesh, FollowingWorker]:
        place = InMesh(self._prepared.description, self._config, seat, self._meeting)
        return place, FollowingWorker(self._prepared, place, self._kernel, _ignore)

    def _kernel(self, model: ModelSpec) -> AttentionKernel:
        return TorchPagedAttention(BuildContext(self._config, model))


def _ignore(stage: str, fraction: float) -> None:
    """Hear of progress that nobody waits for."""
