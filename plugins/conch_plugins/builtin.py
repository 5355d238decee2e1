"""The built-in plugins, by seam. Loads nothing heavy: factories import what they build when they build it."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from conch.api import (
    API_VERSION,
    AttentionKernel,
    AttentionSpec,
    BuildContext,
    Drafter,
    EngineConfig,
    KVConnector,
    KVManager,
    Parallelism,
    PrefixCache,
    Router,
    Scheduler,
    SpeculativeConfig,
    hookimpl,
)

CONCH_API_VERSION = API_VERSION


@dataclass(frozen=True, slots=True)
class LazyKernel:
    """Stands for a kernel class, such as ``package.module:Class``, until it is asked to do something."""

    path: str

    def __call__(self, context: BuildContext) -> AttentionKernel:
        """Build the kernel."""
        kernel: AttentionKernel = pkgutil.resolve_name(self.path)(context)
        return kernel

    def unfit(self, spec: AttentionSpec) -> list[str]:
        """Ask the class why it cannot serve a model."""
        reasons: list[str] = pkgutil.resolve_name(self.path).unfit(spec)
        return reasons


@hookimpl
def conch_schedulers() -> Mapping[str, Callable[[BuildContext], Scheduler]]:
    """`fcfs`, `priority`, `fair` (tenants), `slo` (latency targets), `lpm` (longest cached prefix)."""
    return {"fcfs": _fcfs, "priority": _priority, "fair": _fair, "slo": _slo, "lpm": _lpm}


@hookimpl
def conch_kv_managers() -> Mapping[str, Callable[[BuildContext], KVManager]]:
    """`paged`: blocks of one size with reference counts."""
    return {"paged": _paged}


@hookimpl
def conch_prefix_caches() -> Mapping[str, Callable[[BuildContext], PrefixCache]]:
    """`hash`: full blocks by the hash of their prefix; `radix`: tokens in a tree; `none`."""
    return {"hash": _hash, "radix": _radix, "none": _no_prefix_cache}


@hookimpl
def conch_attention_kernels() -> Mapping[str, Callable[[BuildContext], AttentionKernel]]:
    """`cpu`: C++, for fp32 and bf16 on CPUs; `torch`: plain torch operations, on every device."""
    return {
        "cpu": LazyKernel("conch_plugins.attention.cpu_paged:CpuPagedAttention"),
        "torch": LazyKernel("conch_plugins.attention.torch_paged:TorchPagedAttention"),
    }


@hookimpl
def conch_drafters() -> Mapping[str, Callable[[BuildContext], Drafter]]:
    """`ngram`, `suffix`: what followed before; `draft_model`: a smaller model; `eagle`: a head; `none`."""
    return {
        "none": _no_drafter,
        "ngram": _ngram,
        "suffix": _suffix,
        "draft_model": _draft_model,
        "eagle": _eagle,
    }


@hookimpl
def conch_parallelisms() -> Mapping[str, Callable[[BuildContext], Parallelism]]:
    """`single`: one rank, in the engine's own process; `mesh`: tensor and pipeline parallel ranks."""
    return {"single": _single, "mesh": _mesh}


@hookimpl
def conch_routers() -> Mapping[str, Callable[[EngineConfig], Router]]:
    """`least_loaded`: fewest requests; `round_robin`: in turn; `prefix_affinity`: cached prefix and load."""
    return {"least_loaded": _least_loaded, "round_robin": _round_robin, "prefix_affinity": _prefix_affinity}


@hookimpl
def conch_kv_connectors() -> Mapping[str, Callable[[BuildContext], KVConnector]]:
    """`none`."""
    return {"none": _no_connector}


def _fcfs(context: BuildContext) -> Scheduler:
    from conch_plugins.schedulers.fcfs import FcfsScheduler

    return FcfsScheduler(context)


def _priority(context: BuildContext) -> Scheduler:
    from conch_plugins.schedulers.priority import PriorityScheduler

    return PriorityScheduler(context)


def _fair(context: BuildContext) -> Scheduler:
    from conch_plugins.schedulers.fair import FairScheduler

    return FairScheduler(context)


def _slo(context: BuildContext) -> Scheduler:
    from conch_plugins.schedulers.slo import SloScheduler

    return SloScheduler(context)


def _lpm(context: BuildContext) -> Scheduler:
    from conch_plugins.schedulers.lpm import LpmScheduler

    return LpmScheduler(context)


def _paged(context: BuildContext) -> KVManager:
    from conch_plugins.kv_managers.paged import PagedKVManager

    return PagedKVManager(
        context.num_blocks,
        context.config.block_size,
        context.prefix_cache,
        context.model.attention.reach,
    )


def _hash(context: BuildContext) -> PrefixCache:
    from conch_plugins.prefix_caches.hash import HashPrefixCache
    from conch_plugins.prefix_caches.surroundings import event_log, lower_slots

    return HashPrefixCache(
        context.config.block_size,
        context.model.fingerprint,
        slots=lower_slots(context),
        log=event_log(context),
    )


def _radix(context: BuildContext) -> PrefixCache:
    from conch_plugins.prefix_caches.radix import RadixPrefixCache
    from conch_plugins.prefix_caches.surroundings import event_log, lower_slots

    return RadixPrefixCache(
        context.config.block_size,
        context.model.fingerprint,
        slots=lower_slots(context),
        log=event_log(context),
    )


def _no_prefix_cache(_: BuildContext) -> PrefixCache:
    from conch_plugins.prefix_caches.none import NoPrefixCache

    return NoPrefixCache()


def _no_drafter(_: BuildContext) -> Drafter:
    from conch_plugins.drafters.none import NoDrafter

    return NoDrafter()


def _ngram(context: BuildContext) -> Drafter:
    from conch_plugins.drafters.ngram import NgramDrafter

    return NgramDrafter(*_speculative(context).prompt_lookup)


def _suffix(context: BuildContext) -> Drafter:
    from conch_plugins.drafters.suffix import SuffixDrafter

    return SuffixDrafter(_speculative(context))


def _draft_model(context: BuildContext) -> Drafter:
    from conch_plugins.drafters.draft_model import ModelDrafter

    return ModelDrafter(context.draft_model_factory())


def _eagle(context: BuildContext) -> Drafter:
    from conch_plugins.drafters.eagle import EagleDrafter

    return EagleDrafter(context.draft_head_factory())


def _speculative(context: BuildContext) -> SpeculativeConfig:
    """Return the drafter's settings; the defaults where it is built without any."""
    return context.config.speculative_config or SpeculativeConfig(method="ngram")


def _single(context: BuildContext) -> Parallelism:
    from conch_plugins.parallelism.single import SingleWorker

    return SingleWorker(context.worker_factory)


def _mesh(context: BuildContext) -> Parallelism:
    from conch_plugins.parallelism.mesh import build_mesh

    return build_mesh(context)


def _least_loaded(_: EngineConfig) -> Router:
    from conch_plugins.routers.least_loaded import LeastLoadedRouter

    return LeastLoadedRouter()


def _round_robin(_: EngineConfig) -> Router:
    from conch_plugins.routers.round_robin import RoundRobinRouter

    return RoundRobinRouter()


def _prefix_affinity(config: EngineConfig) -> Router:
    from conch_plugins.routers.prefix_affinity import PrefixAffinityRouter

    return PrefixAffinityRouter.from_config(config)


def _no_connector(_: BuildContext) -> KVConnector:
    from conch_plugins.kv_connectors.none import NoKVConnector

    return NoKVConnector()
