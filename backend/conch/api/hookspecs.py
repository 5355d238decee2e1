"""The hooks. Each is asked once, at start-up, and returns a catalogue: name -> factory.

A plugin is a module (or object) with functions of these names marked by `hookimpl`, offered under the
entry-point group ``conch``. It may set ``CONCH_API_VERSION`` to the version it was written for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from conch.api.config import EngineConfig
from conch.api.context import BuildContext
from conch.api.prefix_caching import PrefixCache
from conch.api.routing import Router
from conch.api.seams import (
    AttentionKernel,
    Drafter,
    KVConnector,
    KVManager,
    Parallelism,
    Scheduler,
)

if TYPE_CHECKING:
    _F = TypeVar("_F", bound=Callable[..., Any])

    def hookspec(function: _F) -> _F:
        """Mark a specification."""

    def hookimpl(function: _F) -> _F:
        """Mark a plugin's implementation of a hook."""
else:
    hookspec = pluggy.HookspecMarker("conch")
    hookimpl = pluggy.HookimplMarker("conch")

API_VERSION = 1
"""Grows when a seam changes in a way that a plugin written before must notice."""


@hookspec
def conch_schedulers() -> Mapping[str, Callable[[BuildContext], Scheduler]]:
    """Schedulers, chosen by the key `scheduler`. Built last, in the engine process."""
    raise NotImplementedError


@hookspec
def conch_kv_managers() -> Mapping[str, Callable[[BuildContext], KVManager]]:
    """KV managers, chosen by the key `kv_manager`. Built after the prefix cache."""
    raise NotImplementedError


@hookspec
def conch_prefix_caches() -> Mapping[str, Callable[[BuildContext], PrefixCache]]:
    """Prefix caches, chosen by the key `prefix_cache`. Built once the size of the pool is known."""
    raise NotImplementedError


@hookspec
def conch_attention_kernels() -> Mapping[str, Callable[[BuildContext], AttentionKernel]]:
    """Attention kernels, chosen by the key `attention_kernel`. Built in every worker.

    The factory must have an attribute ``unfit`` with the kernel's `AttentionKernel.unfit` (a class has).
    """
    raise NotImplementedError


@hookspec
def conch_drafters() -> Mapping[str, Callable[[BuildContext], Drafter]]:
    """Drafters, chosen by `method` of the key `speculative_config`. Built in the worker that samples."""
    raise NotImplementedError


@hookspec
def conch_parallelisms() -> Mapping[str, Callable[[BuildContext], Parallelism]]:
    """Parallelism strategies, chosen by the key `parallelism`. Built before the prefix cache."""
    raise NotImplementedError


@hookspec
def conch_routers() -> Mapping[str, Callable[[EngineConfig], Router]]:
    """Routers over the replicas of a model, chosen by the key `router`. Built in the host: no model there."""
    raise NotImplementedError


@hookspec
def conch_kv_connectors() -> Mapping[str, Callable[[BuildContext], KVConnector]]:
    """Connectors that move KV between engines."""
    raise NotImplementedError
