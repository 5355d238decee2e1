"""What a plugin factory gets to build from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from conch.api.config import EngineConfig
from conch.api.drafting import DraftHead, DraftModel
from conch.api.errors import PluginError
from conch.api.mesh import Ranks
from conch.api.model_spec import ModelSpec
from conch.api.parking import NoParking, Parking
from conch.api.prefix_caching import PrefixCache
from conch.api.seams import KVManager, Worker
from conch.api.steps import Arena

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Frozen facts for a factory. Parts are built in the order of the fields below.

    The order is: attention kernel and drafter (by the worker), parallelism, prefix cache, KV manager,
    scheduler. A part that is not built yet is not there: its accessor raises PluginError.

    Attributes
    ----------
    config
        The engine's configuration.
    model
        The served model.
    parking
        Where preempted requests leave their KV; for schedulers.
    """

    config: EngineConfig
    model: ModelSpec
    _worker_factory: Callable[[], Worker] | None = None
    _ranks: Ranks | None = None
    _draft_model_factory: Callable[[], DraftModel] | None = None
    _draft_head_factory: Callable[[], DraftHead] | None = None
    _num_blocks: int | None = None
    _prefix_cache: PrefixCache | None = None
    _kv_manager: KVManager | None = None
    _slots: Mapping[Arena, int] = field(default_factory=dict)
    parking: Parking = field(default_factory=NoParking)

    @property
    def worker_factory(self) -> Callable[[], Worker]:
        """Builds the worker of this process; for parallelism plugins."""
        return _built(self._worker_factory, "worker_factory")

    @property
    def ranks(self) -> Ranks:
        """Makes the ranks of a mesh, this process's among them; for parallelism plugins."""
        return _built(self._ranks, "ranks")

    @property
    def draft_model_factory(self) -> Callable[[], DraftModel]:
        """Loads `speculative_config.model` beside the target, once; for drafters."""
        return _built(self._draft_model_factory, "draft_model_factory")

    @property
    def draft_head_factory(self) -> Callable[[], DraftHead]:
        """Loads `speculative_config.model` as a head on the target's hidden states, once; for drafters."""
        return _built(self._draft_head_factory, "draft_head_factory")

    @property
    def num_blocks(self) -> int:
        """KV blocks in the pool; for prefix caches and KV managers."""
        return _built(self._num_blocks, "num_blocks")

    def num_slots(self, arena: Arena) -> int:
        """Blocks that an arena besides the KV pool holds; 0 where there is none."""
        return self._slots.get(arena, 0)

    @property
    def prefix_cache(self) -> PrefixCache:
        """The prefix cache in force; for KV managers and schedulers."""
        return _built(self._prefix_cache, "prefix_cache")

    @property
    def kv_manager(self) -> KVManager:
        """The KV manager in force; for schedulers."""
        return _built(self._kv_manager, "kv_manager")

    def with_worker_factory(self, factory: Callable[[], Worker]) -> BuildContext:
        """Return a copy that can build workers."""
        return dataclasses.replace(self, _worker_factory=factory)

    def with_ranks(self, ranks: Ranks) -> BuildContext:
        """Return a copy that can make ranks."""
        return dataclasses.replace(self, _ranks=ranks)

    def with_draft_model_factory(self, factory: Callable[[], DraftModel]) -> BuildContext:
        """Return a copy that can load a draft model."""
        return dataclasses.replace(self, _draft_model_factory=factory)

    def with_draft_head_factory(self, factory: Callable[[], DraftHead]) -> BuildContext:
        """Return a copy that can load a head on the target's hidden states."""
        return dataclasses.replace(self, _draft_head_factory=factory)

    def with_num_blocks(self, num_blocks: int) -> BuildContext:
        """Return a copy that knows the size of the KV pool."""
        return dataclasses.replace(self, _num_blocks=num_blocks)

    def with_num_slots(self, arena: Arena, num_slots: int) -> BuildContext:
        """Return a copy that knows the size of an arena besides the KV pool."""
        return dataclasses.replace(self, _slots={**self._slots, arena: num_slots})

    def with_parking(self, parking: Parking) -> BuildContext:
        """Return a copy that has a place for the KV of preempted requests."""
        return dataclasses.replace(self, parking=parking)

    def with_prefix_cache(self, cache: PrefixCache) -> BuildContext:
        """Return a copy that has a prefix cache."""
        return dataclasses.replace(self, _prefix_cache=cache)

    def with_kv_manager(self, manager: KVManager) -> BuildContext:
        """Return a copy that has a KV manager."""
        return dataclasses.replace(self, _kv_manager=manager)


def _built(part: _T | None, name: str) -> _T:
    if part is None:
        raise PluginError(f"{name} is not built yet when this plugin is; see conch.api.context for the order")
    return part
