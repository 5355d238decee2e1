"""KV events over real sockets: whoever follows them knows what is cached, and nobody waits for anyone."""

from __future__ import annotations

import time
from array import array
from contextlib import contextmanager

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from conch.api import Arena, ConfigError, EngineConfig, SamplingParams
from conch.api.config import parse_config
from conch.api.kv_events import KVEventsConfig
from conch.engine.protocol import AddRequest
from conch.testing.prefix_cache import request
from conch_plugins.kv_managers.paged import PagedKVManager
from conch_plugins.prefix_caches.event_log import SILENT
from conch_plugins.prefix_caches.hash import HashPrefixCache
from conch_plugins.prefix_caches.kv_events import AllBlocksCleared, KVEventBatch, KVEventLog
from conch_plugins.prefix_caches.radix import RadixPrefixCache
from conch_plugins.prefix_caches.zmq_publisher import ZmqPublisher
from support.simulated import simulate

BLOCK = 4
NUM_BLOCKS = 12
ENABLED = {"kv_events_config": {"enable_kv_cache_events": True}}
CACHES = {"hash": HashPrefixCache, "radix": RadixPrefixCache}


class Follower:
    """A router outside: knows the wire format, and nothing else."""

    def __init__(self, endpoint, topic=""):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.last = None
        self.prefixes = {}
        self.where = set()

    def follow(self, until):
        """Apply batches up to one that answers `until`; fails after five seconds without any."""
        while self.socket.poll(5000):
            _, number, payload = self.socket.recv_multipart()
            number = int.from_bytes(number, "big")
            assert self.last is None or number == self.last + 1
            self.last = number
            ts, events, rank = msgspec.msgpack.decode(payload)
            assert abs(time.time() - ts) < 60 and rank == 0
            for event in events:
                self.apply(*event)
            if until(self):
                return
        raise AssertionError("no more events")

    def apply(self, kind, *fields):
        if kind == "AllBlocksCleared":
            self.where.clear()
        elif kind == "BlockStored":
            hashes, parent, tokens, size, lora, medium = fields
            assert size == BLOCK and len(tokens) == size * len(hashes) and lora is None
            for index, block_hash in enumerate(hashes):
                before = () if parent is None else self.prefixes[parent]
                prefix = (*before, *tokens[index * size : (index + 1) * size])
                assert self.prefixes.setdefault(block_hash, prefix) == prefix
                assert (block_hash, medium) not in self.where, "stored twice"
                self.where.add((block_hash, medium))
                parent = block_hash
        else:
            assert kind == "BlockRemoved"
            hashes, medium = fields
            for block_hash in hashes:
                self.where.remove((block_hash, medium))

    def cached(self, medium):
        """Return the prefixes that a medium holds; equal ones of different salts are told apart by hash."""
        return sorted(self.prefixes[block_hash] for block_hash, where in self.where if where == medium)

    def close(self):
        self.context.destroy(linger=0)


@contextmanager
def published(tmp_path, **settings):
    """Open a log and somebody who follows it from its first event on."""
    endpoint = f"ipc://{tmp_path}/events"
    publisher = ZmqPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, **settings))
    follower = Follower(endpoint, settings.get("topic", ""))
    try:
        for _ in range(100):  # until the subscription has arrived
            publisher.publish(KVEventBatch(time.time(), [AllBlocksCleared()]))
            if follower.socket.poll(50):
                break
        yield publisher, follower
    finally:
        publisher.close()
        follower.close()


@pytest.mark.parametrize("name", CACHES)
def test_whoever_follows_knows_exactly_what_is_cached(name, tmp_path):
    with published(tmp_path) as (publisher, follower):

        @settings(max_examples=25, deadline=None)
        @given(
            prompts=st.lists(
                st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=24), st.sampled_from(["", "s"])),
                min_size=1,
                max_size=12,
            ),
            room=st.integers(0, 8),
        )
        def random_traffic(prompts, room):
            log = KVEventLog(BLOCK, Lasting(publisher))
            slots = {Arena.HOST: range(room)} if room else {}
            cache = CACHES[name](BLOCK, "weights", slots=slots, log=log)
            serve(cache, prompts)
            cache.end_step((), ())
            mark = publisher._next_sequence
            publisher.publish(KVEventBatch(time.time(), []))
            follower.follow(lambda one: one.last == mark)
            check(follower, cache)

        random_traffic()


class Lasting:
    """A publisher that outlives the logs that it serves."""

    def __init__(self, publisher):
        self.publish = publisher.publish

    def close(self):
        """Stay open."""


def serve(cache, prompts):
    """Compute prompts one after the other over a small pool; some fail."""
    manager = PagedKVManager(NUM_BLOCKS, BLOCK, cache)
    for number, (tokens, salt) in enumerate(prompts, start=1):
        one = request(number, tokens, salt)
        match = cache.match(one)
        manager.adopt(number, match.blocks)
        if manager.grow(number, match.num_tokens, len(tokens)) is not None:
            cache.insert(one, manager.blocks(number), len(tokens))
        if len(tokens) == 13:
            cache.discard(manager.blocks(number))
        if number % 3:
            manager.release(number)
            cache.forget(number)
        cache.end_step((), ())


def check(follower, cache):
    """Compare with what the cache itself holds."""
    in_pool = cache._by_block.values()
    in_host = [entry for tier in cache._tiers._levels for entry in tier._slots]
    assert follower.cached("GPU") == sorted(prefix_of(entry) for entry in in_pool)
    assert follower.cached("CPU") == sorted(prefix_of(entry) for entry in in_host)


def prefix_of(entry):
    """Return all tokens up to the end of a block, as the cache's own structure has them."""
    if hasattr(entry, "digest"):
        return () if entry.parent is None else (*prefix_of(entry.parent), *array("i", entry.tokens))
    run, node = b"", entry.node
    while node is not None:
        run, node = bytes(node.tokens) + run, node.parent
    return tuple(array("i", run[: (entry.index + 1) * BLOCK * 4]))


def test_a_message_is_topic_number_and_batch(tmp_path):
    with published(tmp_path, topic="kv@engine") as (publisher, follower):
        first = publisher._next_sequence
        log = KVEventLog(BLOCK, publisher)
        cache = HashPrefixCache(BLOCK, "weights", log=log)
        cache.insert(request(1, list(range(9))), [3, 4], 8)
        cache.end_step((), ())
        while True:
            topic, number, payload = follower.socket.recv_multipart()
            if int.from_bytes(number, "big") == first + 1:
                break
        assert topic == b"kv@engine" and len(number) == 8
        _, (event,), _ = msgspec.msgpack.decode(payload)
        one, two = event[1]
        assert event == ["BlockStored", [one, two], None, list(range(8)), BLOCK, None, "GPU"]
        assert 0 <= one < 1 << 64 and one != two


def test_who_missed_something_asks_for_it(tmp_path):
    replay = f"ipc://{tmp_path}/replay"
    with published(tmp_path, replay_endpoint=replay, buffer_steps=5) as (publisher, _):
        first = publisher._next_sequence
        for number in range(8):
            publisher.publish(KVEventBatch(float(number), []))
        asker = zmq.Context()
        socket = asker.socket(zmq.DEALER)
        socket.connect(replay)
        try:
            assert ask(socket, first) == list(range(first + 3, first + 8))
            assert ask(socket, first + 6) == [first + 6, first + 7]
            assert ask(socket, first + 8) == []
            socket.send_multipart((b"", b"nonsense indeed"))
            assert ask(socket, first + 7) == [first + 7]
        finally:
            asker.destroy(linger=0)


def ask(socket, first):
    socket.send_multipart((b"", first.to_bytes(8, "big")))
    numbers = []
    while socket.poll(5000):
        _, number, payload = socket.recv_multipart()
        if not payload:
            assert number == b"\xff" * 8
            return numbers
        numbers.append(int.from_bytes(number, "big"))
    raise AssertionError("no answer")


def test_what_does_not_fit_into_the_queue_is_lost_and_nobody_waits(tmp_path):
    with published(tmp_path, max_queue_size=3) as (publisher, _):
        first = publisher._next_sequence
        for number in range(50_000):
            publisher.publish(KVEventBatch(float(number), []))
        assert len(publisher._queue) <= 3 and publisher._next_sequence == first + 50_000


def test_nobody_listens_and_all_ends_soon(tmp_path):
    publisher = ZmqPublisher(
        KVEventsConfig(enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/x", hwm=1, buffer_steps=1)
    )
    for _ in range(100):
        publisher.publish(KVEventBatch(0.0, []))
    for _ in range(2):
        publisher.close()
    assert not publisher._thread.is_alive() and publisher._context.closed


def run(simulation, number, prompt):
    message = AddRequest(request_id=number, token_ids=tuple(prompt), params=SamplingParams(max_tokens=9))
    simulation.engine.add(message)
    simulation.run()


def test_an_engine_tells_what_it_caches_and_that_it_ends(tmp_path):
    endpoint, replay = f"ipc://{tmp_path}/engine", f"ipc://{tmp_path}/replay"
    events = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, replay_endpoint=replay)
    simulation = simulate(num_blocks=16, kv_events_config=events, prefix_cache="radix")
    listener, asker = Follower(endpoint), zmq.Context()
    try:
        for number in range(1, 100):  # until the subscription has arrived
            run(simulation, number, [number, *range(1, 31)])
            if number > 3 and listener.socket.poll(50):
                break
        socket = asker.socket(zmq.DEALER)
        socket.connect(replay)
        reader = Follower(endpoint)
        reader.close()
        for payload in replayed(socket):
            for event in msgspec.msgpack.decode(payload)[1]:
                reader.apply(*event)
        check(reader, simulation.parts.prefix_cache)
        assert len(reader.where) > 8 and len(reader.prefixes) > len(reader.where), "nothing was evicted"
        simulation.engine.close()
        payload = b""
        while listener.socket.poll(1000):
            payload = listener.socket.recv_multipart()[2]
        assert msgspec.msgpack.decode(payload)[1] == [["AllBlocksCleared"]]
    finally:
        simulation.engine.close()
        asker.destroy(linger=0)
        listener.close()


def replayed(socket):
    """Return all batches from the first one on."""
    socket.send_multipart((b"", (0).to_bytes(8, "big")))
    payloads = []
    while socket.poll(5000):
        payload = socket.recv_multipart()[2]
        if not payload:
            return payloads
        payloads.append(payload)
    raise AssertionError("no answer")


# -- configuration


def test_no_events_unless_asked_for():
    assert EngineConfig(model="m").kv_events_config is None
    assert not KVEventsConfig().is_published
    assert not KVEventsConfig(enable_kv_cache_events=True, publisher="null").is_published
    assert KVEventsConfig(enable_kv_cache_events=True).is_published
    for config in (None, {"publisher": "zmq"}, {"enable_kv_cache_events": True, "publisher": "null"}):
        built = simulate(kv_events_config=config and KVEventsConfig(**config))
        assert built.parts.prefix_cache._log is SILENT


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kv_events_config": {"enable_kv_cache_events": True, "hwm": 0}}, "hwm"),
        ({"kv_events_config": {"enable_kv_events": True}}, "enable_kv_events"),
        ({"kv_events_config": {"publisher": "kafka"}}, "kafka"),
        (
            {"kv_events_config": {"enable_kv_cache_events": True}, "enable_prefix_caching": False},
            "prefix cache",
        ),
        ({"kv_events_config": {"enable_kv_cache_events": True}, "prefix_cache": "none"}, "prefix cache"),
    ],
)
def test_a_wrong_configuration_is_refused(settings, named):
    with pytest.raises(ConfigError, match=named):
        parse_config({"model": "m", **settings})


def test_an_endpoint_that_cannot_be_bound_is_named():
    with pytest.raises(ConfigError, match="/nowhere/at/all"):
        ZmqPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint="ipc:///nowhere/at/all"))
