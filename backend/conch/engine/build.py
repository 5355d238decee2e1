"""From a configuration to a running engine: plugins chosen, model loaded, parts put together."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from conch.api.config import EngineConfig
from conch.api.context import BuildContext
from conch.api.errors import PluginError
from conch.api.mesh import Meeting, Seat
from conch.api.mesh_config import parallelism_in_force
from conch.api.model_spec import AttentionSpec, ModelSpec
from conch.api.parking import make_parking
from conch.api.plan_parts import most_blocks
from conch.api.seams import AttentionKernel, Drafter, KVManager, Worker
from conch.api.steps import Arena
from conch.engine.admission import Limits
from conch.engine.catalogue import Catalogue
from conch.engine.core import Engine, Parts
from conch.engine.mesh.ranks import ProcessRanks
from conch.engine.protocol import EngineReady
from conch.worker import (
    DraftLoaders,
    FollowingWorker,
    InMesh,
    LastStage,
    LocalWorker,
    Prepared,
    WorkerPlugins,
    prepare,
    use_threads,
)

ProgressCallback = Callable[[str, float], None]
LossCallback = Callable[[str], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and what its clients need to know of it."""

    engine: Engine
    info: EngineReady


def _ignore_loss(reason: str) -> None:
    """Leave it to the next step, which fails."""


def build_engine(
    config: EngineConfig, progress: ProgressCallback, on_loss: LossCallback = _ignore_loss
) -> BuiltEngine:
    """Build an engine in this process.

    Parameters
    ----------
    progress
        Told how far it has come.
    on_loss
        Told, from another thread, that a rank is lost and why, even when no step needs it now.

    Raises
    ------
    PluginError
        A plugin is unknown, does not load, does not build, or does not fit the model.
    CheckpointError
        The model cannot be loaded.
    """
    catalogue = Catalogue.load()
    prepared = prepare(config, progress)
    context = BuildContext(_effective(config, prepared.spec.max_model_len), prepared.spec)
    progress("preparing kernels", 0.0)  # compiles them, on a machine that has not done so yet
    if config.remote_ranks:
        where = f"{config.master_addr}:{config.master_port}"
        progress(f"waiting at {where} for ranks of other hosts ({config.remote_ranks})", 0.0)
    parts = _build_parts(catalogue, with_kernel(catalogue, context), prepared, progress, on_loss)
    limits = _limits(context, parts)
    return BuiltEngine(Engine(parts, limits, config.seed), _info(prepared, limits, parts))


def build_follower(config: EngineConfig, seat: Seat, meeting: Meeting) -> FollowingWorker:
    """Build the worker of a rank that does not sample, in this process.

    Parameters
    ----------
    config
        As the engine has settled it.
    meeting
        Where this rank finds the others.
    """
    prepared = prepare(config, _ignore)
    catalogue = Catalogue.load()

    def build_kernel(model: ModelSpec) -> AttentionKernel:
        context = BuildContext(config, model)
        kernel: AttentionKernel = catalogue.build("attention_kernel", config.attention_kernel, context)
        return kernel

    place = InMesh(prepared.description, config, seat, meeting)
    return FollowingWorker(prepared, place, build_kernel, _ignore)


def _ignore(stage: str, fraction: float) -> None:
    """Hear of progress that nobody waits for."""


def _effective(config: EngineConfig, max_model_len: int) -> EngineConfig:
    """Settle what depends on the model: without chunked prefill a step must hold the longest prompt."""
    whole_prompt = 0 if config.enable_chunked_prefill else max_model_len
    return msgspec.structs.replace(
        config,
        max_num_batched_tokens=max(config.max_num_batched_tokens, whole_prompt),
        prefix_cache=config.prefix_cache if config.enable_prefix_caching else "none",
        max_model_len=max_model_len,
    )


def _build_parts(
    catalogue: Catalogue,
    context: BuildContext,
    prepared: Prepared,
    progress: ProgressCallback,
    on_loss: LossCallback,
) -> Parts:
    config = context.config

    def build_kernel(model: ModelSpec) -> AttentionKernel:
        own = dataclasses.replace(context, model=model)
        kernel: AttentionKernel = catalogue.build("attention_kernel", config.attention_kernel, own)
        return kernel

    def build_drafter(load: DraftLoaders) -> Drafter:
        own = context.with_draft_model_factory(load.model).with_draft_head_factory(load.head)
        drafter: Drafter = catalogue.build("drafter", config.drafter, own)
        return drafter

    plugins = WorkerPlugins(build_kernel, build_drafter)

    def build_worker() -> Worker:
        return LocalWorker(prepared, plugins, progress)

    def build_in_mesh(seat: Seat, meeting: Meeting) -> Worker:
        use_threads(config)  # layers are measured with as many as compute them
        place = InMesh(prepared.description, config, seat, meeting)
        worker = LocalWorker(prepared, plugins, progress, place)
        return worker if seat.shape.pipeline == 1 else LastStage(worker, place.clock)

    ranks = ProcessRanks(config, build_in_mesh, on_loss)
    own = context.with_worker_factory(build_worker).with_ranks(ranks)
    parallelism = catalogue.build("parallelism", parallelism_in_force(config), own)
    context = context.with_num_blocks(parallelism.num_blocks)
    for arena in (Arena.HOST, Arena.DISK):
        context = context.with_num_slots(arena, parallelism.num_slots(arena))
    prefix_cache = catalogue.build("prefix_cache", config.prefix_cache, context)
    parking = make_parking(config, parallelism.num_slots(Arena.SWAP))
    context = context.with_prefix_cache(prefix_cache).with_parking(parking)
    kv_manager = catalogue.build("kv_manager", config.kv_manager, context)
    scheduler = catalogue.build("scheduler", config.scheduler, context.with_kv_manager(kv_manager))
    return Parts(scheduler, kv_manager, prefix_cache, parallelism, parking)


def with_kernel(catalogue: Catalogue, context: BuildContext) -> BuildContext:
    """Settle which attention kernel ``auto`` means; refuse one that cannot serve the model."""
    refusals: list[str] = []
    for name in _candidates(context):
        reasons = "; ".join(_unfit(catalogue, name, context))
        if not reasons:
            if refusals:
                _log.warning("attention_kernel %r is used, a slower one: %s", name, ". ".join(refusals))
            config = msgspec.structs.replace(context.config, attention_kernel=name)
            return dataclasses.replace(context, config=config)
        refusals.append(f"{name!r} cannot serve {context.model.name}: {reasons}")
    installed = ", ".join(catalogue.names("attention_kernel"))
    raise PluginError(f"attention_kernel {'. '.join(refusals)}. Installed: {installed}")


def _candidates(context: BuildContext) -> list[str]:
    """Return what to try: for ``auto`` the fastest first."""
    if context.config.attention_kernel != "auto":
        return [context.config.attention_kernel]
    return ["cpu", "torch"] if context.model.attention.device.startswith("cpu") else ["torch"]


def _unfit(catalogue: Catalogue, name: str, context: BuildContext) -> list[str]:
    unfit = getattr(catalogue.factory("attention_kernel", name), "unfit", None)
    if unfit is None:
        raise PluginError(f"attention_kernel {name!r}: its factory has no `unfit`")
    reasons: list[str] = unfit(context.model.attention)
    return reasons


def _limits(context: BuildContext, parts: Parts) -> Limits:
    config, model = context.config, context.model
    return Limits(
        max_model_len=model.max_model_len,
        pool_tokens=_pool_tokens(context, parts.kv_manager),
        max_num_seqs=config.max_num_seqs,
        max_queue_size=config.max_queue_size,
        queue_timeout_s=config.queue_timeout_s,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        held_tokens=_held_tokens(model.attention),
        ttft_target_s=config.ttft_target_s,
        tpot_target_s=config.tpot_target_s,
    )


def _pool_tokens(context: BuildContext, manager: KVManager) -> int:
    """Return how long a request can grow that has the pool to itself."""
    if most_blocks(context.config, context.model) <= manager.num_blocks:
        return context.model.max_model_len  # what is behind its window makes room
    return manager.num_blocks * manager.block_size


def _held_tokens(attention: AttentionSpec) -> int | None:
    """Return what the widest window takes, and the block that it begins in."""
    return None if attention.reach is None else attention.reach + attention.block_size - 1


def _info(prepared: Prepared, limits: Limits, parts: Parts) -> EngineReady:
    return EngineReady(
        model=prepared.spec.name,
        model_folder=str(prepared.folder),
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        max_tokens_per_request=limits.max_tokens,
        max_num_seqs=limits.max_num_seqs,
        num_blocks=parts.kv_manager.num_blocks,
        block_size=parts.kv_manager.block_size,
        eos_token_ids=tuple(sorted(limits.eos_token_ids)),
    )
