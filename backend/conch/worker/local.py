"""One rank that holds the whole model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from conch.api import (
    Arena,
    ErrorCode,
    Failure,
    Move,
    PluginError,
    Row,
    RowResult,
    StepPlan,
    StepResult,
)
from conch.api.experts import ExpertLoad
from conch.model.attention import PagedStep
from conch.model.place import Place, Whole
from conch.worker.arenas import make_arenas
from conch.worker.batch_builder import BatchBuilder
from conch.worker.drafting_parts import DraftingParts, WorkerPlugins
from conch.worker.pool import allocate_pools, blocks_in
from conch.worker.prepare import Prepared
from conch.worker.row_table import RowTable
from conch.worker.sampler import Sampled, Sampler
from conch.worker.speculation import Drafting, NoDrafting
from conch.worker.threads import use_threads
from conch.worker.verification import accepted_count
from conch.worker.warm_up import warm_up_plans

Progress = Callable[[str, float], None]


class LocalWorker:
    """Does steps: `conch.api.Worker` in this process.

    Parameters
    ----------
    prepared
        The model.
    plugins
        Builders of the plugins in force.
    progress
        Told how far loading and warming up have come.
    place
        Which share of the model; None for all of it.

    Raises
    ------
    PluginError
        The kernel cannot serve the model, or a plugin cannot be built.
    CheckpointError
        The weights do not fit the model.
    ConfigError
        Memory does not suffice.
    """

    def __init__(
        self, prepared: Prepared, plugins: WorkerPlugins, progress: Progress, place: Place | None = None
    ) -> None:
        self._place = place or Whole(prepared.description, prepared.config)
        config, spec = prepared.config, self._place.spec
        kernel = plugins.kernel(spec)
        reasons = kernel.unfit(spec.attention)
        if reasons:
            raise PluginError(f"attention kernel {config.attention_kernel!r}: {'; '.join(reasons)}")
        self._device = torch.device(spec.attention.device)
        if self._device.type == "cpu":
            use_threads(config)
        self._spec, self._config = spec, config
        self._kernel = kernel
        self._model = self._place.load(kernel, progress)
        width = -(-spec.max_model_len // config.block_size)
        self._table = RowTable(config.max_num_seqs, spec.max_model_len + 1, width)
        self._builder = BatchBuilder(self._table, config.block_size, self._device)
        self._sampler = Sampler(self._table, spec.eos_token_ids)
        self._drafts = DraftingParts(prepared, self._model, plugins, self._table, self._sampler, progress)
        self._drafting: Drafting = NoDrafting()
        progress("warming up", 0.0)
        self._pools = allocate_pools(spec, kernel, self._place.least("blocks", self._size_pool()))
        self._arenas = make_arenas(config, [*self._pools, *self._drafts.allocate(self.num_blocks)])
        self._drafting = self._drafts.start()
        for plan in warm_up_plans(config, min(spec.max_model_len, self.num_blocks * config.block_size)):
            self.execute(plan)
        self._place.warmed_up()
        self._drafting = self._drafts.start()  # what it has measured so far is not how it will be
        progress("warming up", 1.0)

    @property
    def num_blocks(self) -> int:
        """KV blocks in the pool."""
        return self._pools[0].shape[1]

    def num_slots(self, arena: Arena) -> int:
        """Blocks that another arena holds."""
        return self._arenas.num_slots(arena)

    def expert_load(self) -> ExpertLoad:
        """Return what the experts of the model had to do."""
        return self._place.expert_load()

    def execute(self, plan: StepPlan) -> StepResult:
        """Do the step."""
        started_s = time.perf_counter()
        with torch.inference_mode():
            self._drafting.begin(plan)
            self._learn(plan)
            failed = self._carry_out(plan.moves) if plan.moves else ()
            if not plan.rows:
                return StepResult((), failed_moves=failed)
            batch, wanted = self._builder.build(plan.rows)
            step = PagedStep(self._kernel, self._kernel.plan(batch), self._pools)
            logits = self._model.logits(batch, step)
            sampled = self._sampler.sample(logits, wanted, self._drafting.drawn(plan.rows))
            results = self._accept(plan.rows, sampled)
            result = self._drafting.propose(plan.rows, results, time.perf_counter() - started_s)
            return msgspec.structs.replace(result, failed_moves=failed) if failed else result

    def close(self) -> None:
        """Free the device."""
        self._pools = [pool.new_empty(2, 0) for pool in self._pools]
        self._drafts.close()
        self._arenas.close()
        self._place.close()
        del self._model, self._arenas
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _carry_out(self, moves: Sequence[Move]) -> tuple[int, ...]:
        failed = self._arenas.carry_out(moves)
        self._place.follow(moves)
        return failed

    def _learn(self, plan: StepPlan) -> None:
        """Bring the row table up to date with the plan."""
        gone = self._table.learn(plan)
        if gone:
            self._drafting.forget(gone)

    def _accept(self, rows: Sequence[Row], sampled: Sampled) -> list[RowResult]:
        """Cut what was sampled at the first draft that was wrong, and remember the rest."""
        results = []
        first = 0
        for row in rows:
            end = first + (1 + len(row.drafts) if row.samples else 0)
            results.append(self._accept_row(row, sampled, first, end))
            first = end
        return results

    def _accept_row(self, row: Row, sampled: Sampled, first: int, end: int) -> RowResult:
        """Accept what the logit rows from `first` to `end` brought: none where a row does not sample."""
        if first == end:
            return RowResult(row.request_id, ())
        if sampled.broken and (failure := _failure(sampled, range(first, end))):
            return RowResult(row.request_id, (), failure=failure)
        tokens = sampled.token_ids[first:end]
        accepted = tuple(tokens[: accepted_count(row.drafts, tokens)])
        self._table.append(self._table.row_of(row.request_id), accepted)
        logprobs = None
        if first in sampled.logprobs:
            logprobs = tuple(sampled.logprobs[index] for index in range(first, first + len(accepted)))
        return RowResult(row.request_id, accepted, (), logprobs)

    def _size_pool(self) -> int:
        """Return the number of blocks, measuring what a full step takes where the device is a GPU."""
        config = self._config
        if self._device.type == "cpu" or config.num_gpu_blocks_override:
            free = config.kv_cache_memory_bytes - self._drafts.scratch_bytes
            return blocks_in(config, self._spec, self._kernel, free, self._drafts.block_bytes)
        tokens = min(config.max_num_batched_tokens, self._spec.max_model_len)
        self._pools = allocate_pools(self._spec, self._kernel, -(-tokens // config.block_size))
        torch.cuda.reset_peak_memory_stats(self._device)
        for plan in warm_up_plans(config, tokens):
            self.execute(plan)
        taken = torch.cuda.max_memory_allocated(self._device) - sum(pool.nbytes for pool in self._pools)
        self._pools = []
        total = torch.cuda.get_device_properties(self._device).total_memory
        free = int(total * config.gpu_memory_utilization) - taken - self._drafts.scratch_bytes
        return blocks_in(config, self._spec, self._kernel, free, self._drafts.block_bytes)


def _failure(sampled: Sampled, logit_rows: range) -> Failure | None:
    """Return why a row cannot go on: it has logits that are not numbers."""
    worst = [sampled.broken[index] for index in logit_rows if index in sampled.broken]
    if not worst:
        return None
    return Failure(ErrorCode.INTERNAL, f"the model's logits are not finite: the largest is {worst[0]}")
