"""What each of several engines on one machine is told, so that they do not get in each other's way."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from conch.api.config import DEFAULT_ROUTER, EngineConfig
from conch.api.kv_events import KVEventsConfig

_INSTANCE_NAME = re.compile(r"_(\d+)_(\d+)$")
_PORT = re.compile(r":(\d+)$")


@dataclass(frozen=True, slots=True)
class Instance:
    """One of the `count` instances that Triton runs of a model; `index` says which."""

    index: int = 0
    count: int = 1


def instance_of(model_config: Mapping[str, Any], name: str) -> Instance:
    """Read Triton's instance groups.

    Parameters
    ----------
    model_config
        As Triton hands it over, completed.
    name
        Of the instance, which ends with the index of its group and its own index in there.
    """
    groups = [
        int(group.get("count", 1)) * max(1, len(group.get("gpus", ())))
        for group in model_config.get("instance_group", ())
    ]
    found = _INSTANCE_NAME.search(name)
    group, index = (int(found[1]), int(found[2])) if found else (0, 0)
    return Instance(sum(groups[:group]) + index, max(1, sum(groups)))


def engine_configs(config: EngineConfig, instance: Instance) -> list[EngineConfig]:
    """Return what each replica of an instance is told.

    Where `num_threads` is not set each engine gets its share of the cores. A `seed` is followed by others,
    and so are the ports of KV events.
    """
    size = config.data_parallel_size
    first, count = instance.index * size, instance.count * size
    return [_engine_config(config, first + offset, count) for offset in range(size)]


def _engine_config(config: EngineConfig, index: int, count: int) -> EngineConfig:
    threads = config.num_threads
    if threads is None and count > 1:
        threads = max(1, _cores() // count)
    return msgspec.structs.replace(
        config,
        num_threads=threads,
        seed=None if config.seed is None else config.seed + index,
        kv_events_config=_events_config(config.kv_events_config, index),
        data_parallel_size=1,
        router=DEFAULT_ROUTER,
    )


def _events_config(config: KVEventsConfig | None, index: int) -> KVEventsConfig | None:
    if config is None or index == 0:
        return config
    replay = config.replay_endpoint
    return msgspec.structs.replace(
        config,
        endpoint=_endpoint(config.endpoint, index),
        replay_endpoint=None if replay is None else _endpoint(replay, index),
    )


def _endpoint(endpoint: str, index: int) -> str:
    """Return an endpoint of its own for an engine that binds it: a later port, or a name with its index."""
    if endpoint.startswith("tcp://"):
        if "*" not in endpoint:
            return endpoint  # connected to, which any number may
        return _PORT.sub(lambda found: f":{int(found[1]) + index}", endpoint)
    return f"{endpoint}_{index}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
