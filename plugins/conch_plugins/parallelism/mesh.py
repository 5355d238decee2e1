"""Tensor and pipeline parallelism: ranks that compute every step together."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

from conch.api import Arena, BuildContext, ConchError, Parallelism, StepPlan, StepResult, Worker
from conch.api.experts import NO_EXPERTS, CountsExperts, ExpertLoad
from conch.api.mesh import (
    MeshError,
    MeshShape,
    RankLink,
    RankOrder,
    RankReady,
    Ranks,
    Seat,
)
from conch.api.mesh_config import check_layers, check_model, shape_of
from conch_plugins.parallelism.single import SingleWorker

_END_S = 5.0
"""How long ranks may take to end before they are killed, all together."""


def build_mesh(context: BuildContext) -> Parallelism:
    """Build a mesh of the configured sizes; one rank needs none."""
    config = context.config
    shape = shape_of(config)
    if shape.size == 1:
        return SingleWorker(context.worker_factory)
    check_model(context.model, shape.tensor, shape.pipeline)
    check_layers(context.model, config.pipeline_layers)
    return Mesh(shape, context.ranks, config.distributed_timeout_seconds)


class Mesh:
    """Sends each plan to all ranks at once; rank 0, in this process, does its share when it collects.

    The other ranks begin as soon as they have a plan, those of the first stages with the next one while the
    last stage is still busy with this one. What rank 0 sampled reaches them with the plan after it.

    Parameters
    ----------
    shape
        Of more than one rank.
    ranks
        Makes them.
    timeout_s
        How long to wait for a rank that should join.

    Raises
    ------
    MeshError
        A rank did not join or could not load; the message says which and why.
    """

    def __init__(self, shape: MeshShape, ranks: Ranks, timeout_s: float) -> None:
        self.depth = shape.pipeline
        self._ranks = ranks
        self._links: dict[int, RankLink] = {}
        self._worker: Worker | None = None
        self._submitted: deque[tuple[int, StepPlan]] = deque()
        self._learned: list[tuple[int, tuple[int, ...]]] = []
        self._last_ticket = 0
        seats = [Seat(rank, shape, timeout_s) for rank in range(shape.size)]
        try:
            for seat in seats[1:]:
                self._links[seat.rank] = ranks.start(seat)
            self._await_joined(timeout_s)
            with self._blame():
                self._worker = ranks.worker(seats[0])
            self._sizes = [
                RankReady.of_sizes(self._worker.num_blocks, self._worker.num_slots),
                *(_await_ready(link) for link in self._links.values()),
            ]
        except BaseException:
            self.close()
            raise

    @property
    def num_blocks(self) -> int:
        """KV blocks that every rank has."""
        return min(sizes.num_blocks for sizes in self._sizes)

    def num_slots(self, arena: Arena) -> int:
        """Blocks that every rank has in another arena."""
        return min(sizes.num_slots[arena] for sizes in self._sizes)

    def expert_load(self) -> ExpertLoad:
        """Return what experts had to do, as rank 0 has counted."""
        return self._worker.expert_load() if isinstance(self._worker, CountsExperts) else NO_EXPERTS

    def submit(self, plan: StepPlan) -> int:
        """Tell all ranks; returns the step's ticket."""
        if self._worker is None:
            raise ConchError("the mesh is closed")
        order = RankOrder(plan, tuple(self._learned))
        self._learned.clear()
        with self._blame():
            for link in self._links.values():
                link.send(order)
        self._last_ticket += 1
        self._submitted.append((self._last_ticket, plan))
        return self._last_ticket

    def collect(self, ticket: int) -> StepResult:
        """Do this rank's share of the oldest step. What it raises is raised here, with the rank to blame."""
        if self._worker is None:
            raise ConchError("the mesh is closed")
        oldest, plan = self._submitted.popleft()
        assert oldest == ticket, f"ticket {ticket} collected before ticket {oldest}"
        with self._blame():
            result = self._worker.execute(plan)
        self._learned += [(row.request_id, row.token_ids) for row in result.rows if row.token_ids]
        return result

    def close(self) -> None:
        """End all ranks, by force where they do not listen; safe to repeat."""
        worker, self._worker = self._worker, None
        self._submitted.clear()
        with contextlib.ExitStack() as stack:
            deadline = time.monotonic() + _END_S
            while self._links:
                _, link = self._links.popitem()
                stack.callback(_end, link, deadline)
            if worker is not None:
                worker.close()  # closes its sockets: a rank that waits for it stops waiting

    def _await_joined(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        missing = []
        for rank, link in self._links.items():
            if link.receive(max(0.0, deadline - time.monotonic())) is None:
                missing.append(f"{rank} ({link.whence})")
        if missing:
            raise MeshError(
                f"{len(self._links) + 1 - len(missing)} of {len(self._links) + 1} ranks have joined within "
                f"distributed_timeout_seconds ({timeout_s:g}); missing: {', '.join(missing)}"
            )

    @contextlib.contextmanager
    def _blame(self) -> Iterator[None]:
        """Say which rank is the reason for an error, where one is lost."""
        try:
            yield
        except Exception as error:
            loss = self._ranks.find_loss()
            if loss is None:
                raise
            raise MeshError(loss) from error


def _await_ready(link: RankLink) -> RankReady:
    news = link.receive(None)
    assert isinstance(news, RankReady), f"a rank says {news} where it must be ready"
    return news


def _end(link: RankLink, deadline: float) -> None:
    link.end(max(0.1, deadline - time.monotonic()))
