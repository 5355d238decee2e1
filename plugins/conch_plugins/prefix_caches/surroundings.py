"""What the configuration puts around a cache: lower tiers, and whoever follows its events."""

from __future__ import annotations

from collections.abc import Mapping

from conch.api import Arena, BuildContext, ConfigError
from conch_plugins.prefix_caches.event_log import SILENT, EventLog
from conch_plugins.prefix_caches.kv_events import KVEventLog


def lower_slots(context: BuildContext) -> Mapping[Arena, range]:
    """Return the slots of the tiers that there are, the nearest first."""
    sizes = {arena: context.num_slots(arena) for arena in (Arena.HOST, Arena.DISK)}
    return {arena: range(count) for arena, count in sizes.items() if count}


def event_log(context: BuildContext) -> EventLog:
    """Return what the cache tells its events.

    Raises
    ------
    ConfigError
        They are to be published, and pyzmq is not installed or an endpoint cannot be used.
    """
    config = context.config.kv_events_config
    if config is None or not config.is_published:
        return SILENT
    try:
        from conch_plugins.prefix_caches.zmq_publisher import ZmqPublisher
    except ImportError as error:
        raise ConfigError(f"kv_events_config needs pyzmq: pip install pyzmq ({error})") from error
    return KVEventLog(context.config.block_size, ZmqPublisher(config))
