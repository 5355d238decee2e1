"""The stream of KV events, configured with vLLM's names."""

from __future__ import annotations

from typing import Literal

import msgspec

from conch.api.errors import ConfigError


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether and where an engine tells which prefixes it has cached, for routers outside to follow.

    What is told are hashes of blocks, their token ids and where they lie, in vLLM's format. Requests with a
    `cache_salt` have hashes of their own; the salt itself is not told, but their tokens are: let only those
    listen who may read prompts.

    Attributes
    ----------
    enable_kv_cache_events
        Whether events are published at all.
    publisher
        ``zmq``, or ``null`` for nobody; None is ``zmq`` where events are enabled.
    endpoint
        Of the PUB socket: bound where it has a wildcard or is ``ipc://`` or ``inproc://``, else connected to.
    replay_endpoint
        Where a ROUTER socket answers who missed something: asked with the first sequence number wanted (8
        bytes, big endian), it sends every batch from there on that is still kept, and one without content.
    buffer_steps
        Batches kept for that.
    hwm
        Batches that may wait for a slow subscriber before it loses some.
    max_queue_size
        Batches that may wait to be sent; one more is lost, which subscribers see in the sequence numbers.
    topic
        First frame of every message.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        """Refuse sizes out of range."""
        for key in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"kv_events_config: {key} must be greater than 0, not {getattr(self, key)}")

    @property
    def is_published(self) -> bool:
        """Whether anything is sent."""
        return self.enable_kv_cache_events and self.publisher != "null"
