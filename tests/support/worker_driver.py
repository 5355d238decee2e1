"""Drives a LocalWorker by hand: hands out blocks, splits prompts as told, and collects answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from conch.api import (
    Admission,
    BuildContext,
    EngineConfig,
    Move,
    Row,
    RowResult,
    SamplingParams,
    SpeculativeConfig,
    StepPlan,
)
from conch.worker import LocalWorker, WorkerPlugins, prepare
from conch_plugins.attention.cpu_paged import CpuPagedAttention
from conch_plugins.attention.torch_paged import TorchPagedAttention

KERNELS = {"torch": TorchPagedAttention, "cpu": CpuPagedAttention}


def silent(stage: str, fraction: float) -> None:
    pass


def config_for(folder: Path | str, **settings) -> EngineConfig:
    """Configure a small engine: fp32 on one thread, small blocks."""
    defaults = {"dtype": "float32", "num_threads": 1, "block_size": 4, "num_gpu_blocks_override": 400}
    return EngineConfig(model=str(folder), device="cpu", **{**defaults, **settings})


def build_worker(folder: Path, drafter=None, **settings) -> LocalWorker:
    """Build a worker over the kernel that `attention_kernel` names: `torch`, unless it is given."""
    speculative = SpeculativeConfig(method="test", num_speculative_tokens=8, backoff=False)
    given = {"attention_kernel": "torch", "speculative_config": speculative if drafter else None}
    config = config_for(folder, **{**given, **settings})
    prepared = prepare(config, silent)
    plugins = WorkerPlugins(
        kernel=lambda spec: KERNELS[config.attention_kernel](BuildContext(config, spec)),
        drafter=lambda load: drafter,
    )
    return LocalWorker(prepared, plugins, silent)


@dataclass
class Job:
    """A request as the driver sees it."""

    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    drafts: tuple[int, ...] = ()
    admitted: bool = False

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]

    @property
    def done(self) -> bool:
        return len(self.output) >= self.params.max_tokens


class Driver:
    """Runs jobs on a worker, a row each a step, prompts in chunks."""

    def __init__(self, worker: LocalWorker, block_size: int = 4) -> None:
        self.worker = worker
        self.size = block_size
        self.free = list(range(worker.num_blocks))[::-1]
        self.finished: list[int] = []
        self.preempted: list[int] = []
        self.accepted = 0

    def row(self, job: Job, chunk: int) -> tuple[Row, Admission | None]:
        """Pay a job up to `chunk` of what it is owed."""
        owed = len(job.tokens) - job.computed
        count = min(owed, chunk)
        samples = count == owed
        drafts = job.drafts if samples else ()
        start = job.computed
        known = len(job.blocks)
        needed = -(-(start + count + len(drafts)) // self.size)
        job.blocks += [self.free.pop() for _ in range(needed - known)]
        admission = None
        if not job.admitted:
            limit = len(job.prompt) + job.params.max_tokens
            admission = Admission(job.id, tuple(job.tokens), len(job.prompt), job.params, job.seed, limit)
            job.admitted, known = True, 0
        row = Row(job.id, start, count + len(drafts), samples, drafts, known, tuple(job.blocks[known:]))
        return row, admission

    def step(self, jobs: list[Job], chunk: int, moves: tuple[Move, ...] = ()) -> None:
        """Give each job a row and take in the results."""
        pairs = [self.row(job, chunk) for job in jobs]
        rows = tuple(row for row, _ in pairs)
        plan = StepPlan(
            rows=rows,
            admitted=tuple(admission for _, admission in pairs if admission),
            finished=tuple(self.finished),
            preempted=tuple(self.preempted),
            moves=moves,
        )
        self.finished, self.preempted = [], []
        results = self.worker.execute(plan).rows
        assert [result.request_id for result in results] == [job.id for job in jobs]
        for job, row, result in zip(jobs, rows, results, strict=True):
            self._take(job, row, result)

    def _take(self, job: Job, row: Row, result: RowResult) -> None:
        if not row.samples:
            assert result.token_ids == () and result.drafts == ()
            job.computed = row.start + row.count
            return
        assert 1 <= len(result.token_ids) <= 1 + len(row.drafts)
        self.accepted += len(result.token_ids) - 1
        job.computed = row.start + row.count - len(row.drafts) + len(result.token_ids) - 1
        job.output += result.token_ids
        job.drafts = result.drafts
        if result.logprobs is not None:
            assert len(result.logprobs) == len(result.token_ids)
            job.logprobs += result.logprobs
        if job.done:
            self.finish(job)

    def finish(self, job: Job) -> None:
        self.free += job.blocks
        job.blocks = []
        self.finished.append(job.id)

    def preempt(self, job: Job) -> None:
        """Take a job's blocks away; its next row computes all its tokens again."""
        self.free += job.blocks
        job.blocks, job.computed, job.drafts, job.admitted = [], 0, (), False
        self.preempted.append(job.id)

    def run(self, jobs: list[Job], chunk: int = 1000, stagger: int = 0) -> None:
        """Run to the end; job i joins at step ``i * stagger``."""
        step = 0
        while any(not job.done for job in jobs):
            live = [job for i, job in enumerate(jobs) if not job.done and i * stagger <= step]
            if live:
                self.step(live, chunk)
            step += 1
