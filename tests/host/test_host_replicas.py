"""Several engines behind one model instance: placement, death, return, and what is told of it."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
from fake_engine_process import REFUSES

from conch.api.config import EngineConfig
from conch.api.errors import ConchError, ConfigError
from conch.api.kv_events import KVEventsConfig
from conch.engine.protocol import EngineStats
from conch.host.instance import Instance
from conch.host.session import Burden
from conch.host.shares import EngineShare, engine_shares
from host.host_fakes import FakeRequest, wait_until

TEXT = "the quick brown fox"
ENDLESS = {"max_tokens": 200, "ignore_eos": True}
PAIR = {"data_parallel_size": 2}


def send(backend, salt="", text=TEXT, stream=True, **sampling):
    request = FakeRequest(
        text_input=text, stream=stream, cache_salt=salt, sampling_parameters={**ENDLESS, **sampling}
    )
    backend.execute([request])
    return request.sender


def loads(backend):
    """Requests in flight on each replica that serves, as a router would see them."""
    sessions = [replica.client.session for replica in backend._replicas._running]
    return [one.burden.load().running + one.burden.load().waiting for one in sessions if one is not None]


def kill_one(among):
    """Kill one engine of those that were not there before."""
    (victim, *_) = {one.pid for one in psutil.Process().children()} - among
    os.kill(victim, signal.SIGKILL)


@pytest.fixture
def before():
    return {one.pid for one in psutil.Process().children()}


@pytest.mark.parametrize("router", ["least_loaded", "round_robin", "prefix_affinity"])
def test_a_burst_spreads_and_all_are_answered(make_backend, router):
    backend = make_backend(router=router, **PAIR)
    senders = [send(backend, "silent", text=f"{TEXT} {number}") for number in range(20)]
    assert max(loads(backend)) - min(loads(backend)) <= 4 and sum(loads(backend)) == 20
    for sender in senders:
        sender.cancelled = True
    assert all(sender.wait().error.kind == "CANCELLED" for sender in senders)
    assert loads(backend) == [0, 0]
    answers = [send(backend, max_tokens=3) for _ in range(10)]
    assert all(answer.wait().error is None for answer in answers)
    wait_until(lambda: loads(backend) == [0, 0])


def test_choices_of_one_request_live_on_one_replica(make_backend):
    backend = make_backend(**PAIR)
    sender = send(backend, "silent", n=3, temperature=1.0)
    assert sorted(loads(backend)) == [0, 3]
    others = [send(backend, "silent") for _ in range(3)]
    assert loads(backend) == [3, 3]
    for one in (sender, *others):
        one.cancelled = True
        one.wait()
    assert loads(backend) == [0, 0]


def test_one_death_is_told_to_its_requests_only_and_repaired(make_backend, before):
    backend = make_backend(**PAIR)
    wait_until(lambda: backend.pb.value("replicas_ready") == 2)
    senders = [send(backend, "silent") for _ in range(8)]
    began = time.monotonic()
    kill_one(before)
    wait_until(lambda: sum(sender.done.is_set() for sender in senders) == 4)
    assert time.monotonic() - began < 15
    failed = [sender for sender in senders if sender.done.is_set()]
    assert {(sender.error.kind, "signal 9" in sender.error.text) for sender in failed} == {("INTERNAL", True)}
    assert send(backend, max_tokens=3).wait().error is None  # the other one serves all the while
    wait_until(lambda: backend.pb.value("engine_restarts_total") == 1, 20)
    wait_until(lambda: backend.pb.value("replicas_ready") == 2)
    assert len(loads(backend)) == 2 and not backend.pb.unloaded
    more = [send(backend, "silent") for _ in range(4)]
    assert loads(backend) == [4, 4]
    for sender in (*senders, *more):
        sender.cancelled = True
        sender.wait()


def test_a_degraded_model_says_so(make_backend, before, monkeypatch):
    backend = make_backend(**PAIR)
    monkeypatch.setattr(backend._replicas._running[0].client, "_command", ("false",))
    monkeypatch.setattr(backend._replicas._running[1].client, "_command", ("false",))
    wait_until(lambda: backend.pb.value("replicas_ready") == 2)
    kill_one(before)
    wait_until(lambda: backend.pb.value("replicas_ready") == 1)
    assert (
        backend.pb.value("engine_ready", replica="tiny_0_0/0")
        + backend.pb.value("engine_ready", replica="tiny_0_0/1")
        == 1
    )
    assert [send(backend, max_tokens=3).wait().error for _ in range(4)] == [None] * 4
    assert not backend.pb.unloaded  # it is ready, which is the truth


def test_what_the_client_has_not_seen_is_served_again(make_backend, before):
    backend = make_backend(on_replica_failure="replay", **PAIR)
    whole = [send(backend, stream=False, max_tokens=100) for _ in range(6)]
    kill_one(before)
    assert all(sender.wait(20).error is None for sender in whole)
    assert len({sender.text() for sender in whole}) == 1
    assert all(sender.finals == 1 and len(sender.responses) == 1 for sender in whole)
    wait_until(lambda: backend.pb.value("engine_restarts_total") == 1, 20)


def test_a_stream_that_has_begun_is_not_served_again(make_backend, before):
    backend = make_backend(on_replica_failure="replay", **PAIR)
    senders = [send(backend, max_tokens=10_000) for _ in range(4)]
    wait_until(lambda: all(sender.responses for sender in senders))
    kill_one(before)
    wait_until(lambda: sum(sender.done.is_set() for sender in senders) == 2)
    assert all(sender.error.kind == "INTERNAL" for sender in senders if sender.done.is_set())
    for sender in senders:
        sender.cancelled = True


def test_a_request_that_kills_engines_is_served_again_once(make_backend):
    backend = make_backend(on_replica_failure="replay", **PAIR)
    assert send(backend, "die").wait(20).error.kind == "INTERNAL"
    wait_until(lambda: backend.pb.value("engine_restarts_total") == 2, 20)
    assert send(backend, max_tokens=3).wait(20).error is None


def test_a_single_engine_replays_when_it_is_back(make_backend, before):
    backend = make_backend(on_replica_failure="replay")
    sender = send(backend, stream=False, max_tokens=150)
    kill_one(before)
    assert sender.wait(20).error is None
    wait_until(lambda: backend.pb.value("engine_restarts_total") == 1)


def test_one_engine_that_does_not_start_fails_the_model(make_backend):
    with pytest.raises(ConchError, match=r"replica 1 failed: .*cheese"):
        make_backend(seed=REFUSES - 1, **PAIR)  # the second one's is the next


def test_a_router_that_is_not_there_is_named(make_backend):
    with pytest.raises(ConchError, match="unknown router 'best'; installed: least_loaded"):
        make_backend(router="best", **PAIR)
    with pytest.raises(ConfigError, match="nothing to choose with data_parallel_size 1"):
        EngineConfig(model="none", router="round_robin")


def test_a_router_that_breaks_breaks_one_request(make_backend, monkeypatch):
    backend = make_backend(**PAIR)
    monkeypatch.setattr(backend._replicas._router, "place", lambda request, loads: 7)
    assert "the router failed" in send(backend).wait().error.text
    monkeypatch.undo()
    assert send(backend, max_tokens=3).wait().error is None


def test_counts_are_told_by_replica_and_requests_once(make_backend):
    backend = make_backend(**PAIR)
    for _ in range(6):
        send(backend, max_tokens=5).wait()
    wait_until(lambda: backend.pb.value("generation_tokens_total") == 30)
    by_replica = [
        backend.pb.value("generation_tokens_total", replica=f"tiny_0_0/{index}") for index in (0, 1)
    ]
    assert sum(by_replica) == 30 and min(by_replica) >= 10
    wait_until(lambda: backend.pb.value("request_success_total", replica="tiny_0_0") == 6)


def test_burden_counts_what_was_placed_before_it_is_heard_of():
    burden = Burden(engine=5, seats=4)
    burden.take(6)
    assert (burden.load().running, burden.load().waiting) == (4, 2)
    burden.hear(EngineStats(running=2, waiting=4, kv_blocks_used=3, kv_blocks_total=12))
    assert burden.load().kv_usage == 0.25
    assert (burden.load().running, burden.load().waiting) == (2, 4)  # its pool is full, not its seats
    burden.take(1)
    assert (burden.load().running, burden.load().waiting) == (2, 5)
    burden.release(6)
    assert (burden.load().running, burden.load().waiting) == (1, 0)  # what has ended is not counted


def test_engines_share_cores_and_ports_and_have_seeds_of_their_own():
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:7000", "replay_endpoint": "ipc:///x"}
    config = EngineConfig(model="m", seed=3, data_parallel_size=2, kv_events_config=KVEventsConfig(**events))
    cores = len(os.sched_getaffinity(0))
    told = [share.config for share in engine_shares(config, Instance(index=1, count=2))]
    assert [one.num_threads for one in told] == [max(1, cores // 4)] * 2
    assert [one.seed for one in told] == [5, 6]
    assert [one.kv_events_config.endpoint for one in told] == ["tcp://*:7002", "tcp://*:7003"]
    assert [one.kv_events_config.replay_endpoint for one in told] == ["ipc:///x_2", "ipc:///x_3"]
    assert {one.data_parallel_size for one in told} == {1}
    (alone,) = engine_shares(EngineConfig(model="m"), Instance())
    assert alone == EngineShare(EngineConfig(model="m"), {})
    (asked,) = engine_shares(EngineConfig(model="m", num_threads=7), Instance(0, 3))
    assert asked.config.num_threads == 7
