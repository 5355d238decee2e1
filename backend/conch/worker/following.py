"""A rank that computes its share of each step, and samples nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from conch.api import Arena, AttentionKernel, ModelSpec, PluginError
from conch.api.mesh import RankOrder
from conch.model.attention import PagedStep
from conch.model.place import InMesh
from conch.worker.arenas import make_arenas
from conch.worker.batch_builder import BatchBuilder
from conch.worker.pool import allocate_pools, blocks_in
from conch.worker.prepare import Prepared
from conch.worker.row_table import RowTable
from conch.worker.threads import use_threads
from conch.worker.warm_up import warm_up_plans

Progress = Callable[[str, float], None]


class FollowingWorker:
    """Any rank but the one that samples. It hears what was sampled with the next order.

    Parameters
    ----------
    prepared
        The model.
    place
        Its share of it.
    make_kernel
        Builds the attention kernel for a share.
    progress
        Told how far loading has come.
    """

    def __init__(
        self,
        prepared: Prepared,
        place: InMesh,
        make_kernel: Callable[[ModelSpec], AttentionKernel],
        progress: Progress,
    ) -> None:
        config, spec = prepared.config, place.spec
        self._kernel = make_kernel(spec)
        reasons = self._kernel.unfit(spec.attention)
        if reasons:
            raise PluginError(f"attention kernel {config.attention_kernel!r}: {'; '.join(reasons)}")
        use_threads(config)
        self._place = place
        self._model = place.load(self._kernel, progress)
        width = -(-spec.max_model_len // config.block_size)
        self._table = RowTable(config.max_num_seqs, spec.max_model_len + 1, width)
        self._builder = BatchBuilder(self._table, config.block_size, torch.device("cpu"))
        fitting = blocks_in(config, spec, self._kernel, config.kv_cache_memory_bytes)
        self._pools = allocate_pools(spec, self._kernel, place.least("blocks", fitting))
        self._arenas = make_arenas(config, self._pools)
        for plan in warm_up_plans(config, min(spec.max_model_len, self.num_blocks * config.block_size)):
            self.execute(RankOrder(plan))
        place.warmed_up()

    @property
    def num_blocks(self) -> int:
        """KV blocks in the pool."""
        return self._pools[0].shape[1]

    def num_slots(self, arena: Arena) -> int:
        """Blocks that another arena holds."""
        return self._arenas.num_slots(arena)

    def execute(self, order: RankOrder) -> None:
        """Do this rank's share of a step."""
        self._place.clock.begin()
        for request_id, token_ids in order.learned:
            if request_id in self._table:
                self._table.append(self._table.row_of(request_id), token_ids)
        plan = order.plan
        self._table.learn(plan)
        with torch.inference_mode():
            if plan.moves:
                self._arenas.carry_out(plan.moves)
                self._place.follow(plan.moves)
            if plan.rows:
                batch, _ = self._builder.build(plan.rows)
                self._model.compute(batch, PagedStep(self._kernel, self._kernel.plan(batch), self._pools))

    def close(self) -> None:
        """Leave the other ranks."""
        self._arenas.close()
        self._place.close()
