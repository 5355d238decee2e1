"""An engine whose model is arithmetic over a simulated KV pool.

The next token is a function of the tokens found in the pool through the row's block table. A wrong block, a
copy that was missed, a block shared by mistake or overwritten too early: each changes the output.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from conch.api import (
    Arena,
    AttentionSpec,
    BuildContext,
    EngineConfig,
    ErrorCode,
    Failure,
    ModelSpec,
    RowResult,
    StepPlan,
    StepResult,
)
from conch.api.mesh_config import parallelism_in_force
from conch.api.parking import make_parking
from conch.engine.admission import Limits
from conch.engine.catalogue import Catalogue
from conch.engine.core import Engine, Parts
from conch.testing import ListeningRanks

VOCAB = 997
EOS = 0
EMPTY = None
POISON = 996
"""A prompt with this token makes the model's numbers infinite."""


def next_token(tokens, seed=0):
    """The simulated model: any change in any token, or their order, changes it."""
    value = 17 + seed
    for token in tokens:
        value = (value * 31 + token + 7) % 1_000_003
    return 1 + value % (VOCAB - 2)


def expected(prompt, count, seed=0):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tuple(tokens[len(prompt) :])


@dataclass
class _Known:
    token_ids: list[int]
    seed: int
    blocks: list[int] = field(default_factory=list)


class SimulatedWorker:
    """Does what a worker does, on integers, and checks that it is never asked for the impossible."""

    def __init__(self, num_blocks, block_size, drafter=lambda tokens, room: (), num_swap=0):
        self.num_blocks = num_blocks
        self._size = block_size
        self._pool = [[EMPTY] * block_size for _ in range(num_blocks)]
        self._swap = [[EMPTY] * block_size for _ in range(num_swap)]
        self._known: dict[int, _Known] = {}
        self._drafter = drafter
        self.plans: list[StepPlan] = []
        self.closed = False

    def num_slots(self, arena):
        return len(self._swap) if arena is Arena.SWAP else 0

    def execute(self, plan):
        self.plans.append(plan)
        for request_id in (*plan.preempted, *plan.finished):
            self._known.pop(request_id, None)
        for admission in plan.admitted:
            assert admission.request_id not in self._known
            self._known[admission.request_id] = _Known(list(admission.token_ids), admission.seed)
        for move in plan.moves:
            arenas = {Arena.DEVICE: self._pool, Arena.SWAP: self._swap}
            arenas[move.target_arena][move.target] = list(arenas[move.source_arena][move.source])
        return StepResult(tuple(self._row(row) for row in plan.rows))

    def _row(self, row):
        known = self._known[row.request_id]
        known.blocks[row.blocks_from :] = row.blocks
        committed = known.token_ids[: row.start + row.count - len(row.drafts)]
        tokens = [*committed, *row.drafts][row.start :]
        assert len(tokens) == row.count
        for position, token in enumerate(tokens, start=row.start):
            self._pool[known.blocks[position // self._size]][position % self._size] = token
        if not row.samples:
            return RowResult(row.request_id, ())
        if POISON in known.token_ids:
            return RowResult(row.request_id, (), failure=Failure(ErrorCode.INTERNAL, "not finite"))
        new = []
        for length in range(row.start + row.count - len(row.drafts), row.start + row.count + 1):
            new.append(next_token(self._read(known, length), known.seed))
            index = len(new) - 1
            if index >= len(row.drafts) or row.drafts[index] != new[-1]:
                break
        known.token_ids.extend(new)
        return RowResult(row.request_id, tuple(new), tuple(self._drafter(known.token_ids, 3)))

    def _read(self, known, length):
        tokens = [self._pool[known.blocks[p // self._size]][p % self._size] for p in range(length)]
        assert EMPTY not in tokens, "reads KV that was never written"
        return tokens

    def close(self):
        self.closed = True


@dataclass(frozen=True)
class Simulation:
    """An engine over a simulated worker, and its parts for tests to look into."""

    engine: Engine
    worker: SimulatedWorker
    parts: Parts

    def run(self, steps=10_000):
        """Step until nothing is left; returns all news."""
        news = []
        while self.engine.has_work:
            news += self.engine.step()
            steps -= 1
            assert steps > 0, "no progress"
        return news

    def check_idle(self):
        """Nothing is held by anyone."""
        self.parts.kv_manager.check_integrity()
        assert self.parts.kv_manager.free_blocks == self.parts.kv_manager.num_blocks
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used, stats.kv_blocks_parked) == (0, 0, 0, 0)


def simulate(num_blocks=64, drafter=None, limits=None, **settings) -> Simulation:
    """Build an engine from the installed plugins, with settings of `EngineConfig`."""
    defaults = {"model": "simulated", "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    config = EngineConfig(**{**defaults, **settings})
    layers = (None,) * config.pipeline_parallel_size
    attention = AttentionSpec(1, 1, 8, 8, layers, False, False, "float32", "cpu", config.block_size)
    spec = ModelSpec("simulated", "f", VOCAB, config.max_model_len or 512, frozenset({EOS}), attention)
    swap = config.swap_space_bytes  # a block a byte
    worker = SimulatedWorker(num_blocks, config.block_size, drafter or (lambda tokens, room: ()), swap)
    catalogue = Catalogue.load()
    context = BuildContext(config, spec).with_worker_factory(lambda: worker)
    context = context.with_ranks(ListeningRanks(lambda: worker))
    parallelism = catalogue.build("parallelism", parallelism_in_force(config), context)
    context = context.with_num_blocks(parallelism.num_blocks)
    cache = catalogue.build("prefix_cache", config.prefix_cache, context)
    parking = make_parking(config, parallelism.num_slots(Arena.SWAP))
    context = context.with_prefix_cache(cache).with_parking(parking)
    manager = catalogue.build("kv_manager", config.kv_manager, context)
    scheduler = catalogue.build("scheduler", config.scheduler, context.with_kv_manager(manager))
    parts = Parts(scheduler, manager, cache, parallelism, parking)
    bounds = Limits(
        max_model_len=spec.max_model_len,
        pool_tokens=num_blocks * config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_queue_size=config.max_queue_size,
        queue_timeout_s=config.queue_timeout_s,
        vocab_size=VOCAB,
        eos_token_ids=spec.eos_token_ids,
    )
    return Simulation(Engine(parts, replace(bounds, **(limits or {})), seed=1), worker, parts)


def collect(news):
    """Gather news: {(request, choice): (token ids, finish reason)} and {request: failure}."""
    tokens: dict[tuple[int, int], list[int]] = {}
    reasons, failures = {}, {}
    for output in news:
        key = (output.request_id, output.choice)
        if output.failure is not None:
            assert output.request_id not in failures
            failures[output.request_id] = output.failure
            continue
        assert key not in reasons, "news after the end"
        tokens.setdefault(key, []).extend(output.token_ids)
        if output.finish_reason is not None:
            reasons[key] = output.finish_reason
    return {key: (tuple(ids), reasons.get(key)) for key, ids in tokens.items()}, failures
