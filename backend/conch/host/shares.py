"""What each of several engines on one machine is told, so that they do not get in each other's way."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from conch.api.config import DEFAULT_ROUTER, EngineConfig
from conch.api.cores import share_of_cores
from conch.api.kv_events import KVEventsConfig
from conch.host.devices import divide_devices, environment_for
from conch.host.instance import Instance

_PORT = re.compile(r":(\d+)$")


@dataclass(frozen=True, slots=True)
class EngineShare:
    """What one engine process is given.

    Attributes
    ----------
    config
        Its own.
    environment
        Variables that it gets besides those of this process.
    """

    config: EngineConfig
    environment: Mapping[str, str] = field(default_factory=dict)


def engine_shares(config: EngineConfig, instance: Instance) -> list[EngineShare]:
    """Return what each replica of an instance is given.

    Where `num_threads` is not set each engine gets its share of the cores. A `seed` is followed by others,
    and so are the ports of KV events. Of the instance's GPUs each sees its own only, and has to find them.

    Raises
    ------
    ConfigError
        The instance has too few GPUs, or too many.
    """
    size = config.data_parallel_size
    first, count = instance.index * size, instance.count * size
    shares = [EngineShare(_engine_config(config, first + offset, count)) for offset in range(size)]
    if instance.devices is None:
        return shares
    return [
        EngineShare(
            msgspec.structs.replace(share.config, device="cuda"), environment_for(devices, os.environ)
        )
        for share, devices in zip(shares, divide_devices(instance.devices, config), strict=True)
    ]


def _engine_config(config: EngineConfig, index: int, count: int) -> EngineConfig:
    threads = config.num_threads
    if threads is None and count > 1:
        threads = share_of_cores(config, engines=count)
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
