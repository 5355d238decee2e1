"""However a request ends, its client hears of it exactly once, and nothing of Triton's is kept."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref

import pytest
from fake_engine_process import DIES, REFUSES

from conch.api.errors import ConchError
from conch.host import engine_client, outage
from conch.host.termination import TerminationWatch
from host.host_fakes import FakePbUtils, FakeRequest, wait_until, write_checkpoint

TEXT = "the quick brown fox"
ENDLESS = {"max_tokens": 200, "ignore_eos": True}


def stream(backend, salt="", text=TEXT, **sampling):
    request = FakeRequest(
        text_input=text, stream=True, cache_salt=salt, sampling_parameters={**ENDLESS, **sampling}
    )
    backend.execute([request])
    return request.sender


def test_a_client_that_leaves_is_noticed_within_200_ms(make_backend):
    backend = make_backend()
    gone, waiting, healthy = stream(backend), stream(backend, "silent"), stream(backend, max_tokens=100)
    wait_until(lambda: gone.responses)
    began = time.monotonic()
    gone.cancelled = waiting.cancelled = True
    gone.wait(), waiting.wait()
    assert time.monotonic() - began < 0.2 + 0.1  # and what a busy machine takes
    assert gone.error.kind == waiting.error.kind == "CANCELLED"
    assert healthy.wait().error is None
    assert gone.finals == waiting.finals == healthy.finals == 1
    assert gone.polls_after_final == 0
    wait_until(lambda: backend.pb.value("request_cancelled_total") == 2)


def test_a_failing_send_harms_nobody_else(make_backend):
    backend = make_backend()
    broken, healthy = stream(backend), stream(backend, max_tokens=50)
    wait_until(lambda: broken.responses)
    broken.fails_with = RuntimeError("the client is gone")
    assert healthy.wait().error is None
    assert broken.wait().finals == 1


def test_a_failure_in_the_engine_reaches_the_client(make_backend):
    backend = make_backend()
    sender = stream(backend, "fail").wait()
    assert (sender.error.kind, sender.error.text) == ("UNAVAILABLE", "the request timed out")


@pytest.mark.parametrize(
    ("how", "words"), [("die", "signal 9"), ("break", "a screw is loose"), ("garbage", "understood")]
)
def test_a_dead_engine_is_told_at_once_and_replaced(make_backend, how, words):
    backend = make_backend()
    senders = [stream(backend) for _ in range(3)]
    wait_until(lambda: all(sender.responses for sender in senders))
    began = time.monotonic()
    killer = stream(backend, how)
    for sender in [*senders, killer]:
        assert sender.wait().error.kind == "INTERNAL"
        assert words in sender.error.text
        assert sender.finals == 1
    assert time.monotonic() - began < 4
    after = stream(backend, max_tokens=3)  # it waits for the engine to come back
    assert after.wait(20).error is None
    wait_until(lambda: backend.pb.value("engine_restarts_total") == 1)
    assert backend.pb.value("engine_ready") == 1


def test_counters_go_on_when_the_engine_starts_again(make_backend):
    backend = make_backend()
    stream(backend, max_tokens=5).wait()
    wait_until(lambda: backend.pb.value("generation_tokens_total") == 5)
    stream(backend, "die").wait()
    wait_until(lambda: backend.pb.value("engine_ready") == 0 or backend.pb.value("engine_restarts_total"))
    stream(backend, max_tokens=7).wait(20)
    wait_until(lambda: backend.pb.value("generation_tokens_total") == 12)


def test_requests_wait_for_the_engine_only_so_long(make_backend, tmp_path, monkeypatch):
    monkeypatch.setattr(outage, "HOLD_S", 0.3)
    write_checkpoint(tmp_path / "own")
    backend = make_backend(folder=tmp_path / "own")
    (tmp_path / "own" / "refuse").touch()
    stream(backend, "die").wait()
    held, left = stream(backend), stream(backend)
    left.cancelled = True
    assert left.wait().error.kind == "CANCELLED"
    assert held.wait().error.kind == "UNAVAILABLE"
    wait_until(lambda: backend.pb.unloaded == ["tiny"], 20)  # several failed starts later
    monkeypatch.setattr(outage, "HOLD_S", 60.0)
    assert stream(backend).wait(1).error.kind == "UNAVAILABLE"  # there is little hope by now
    (tmp_path / "own" / "refuse").unlink()
    wait_until(lambda: stream(backend, max_tokens=3).wait().error is None, 20)
    assert not backend._responder._departures  # an engine that never heard of them has no last word on them


def test_an_engine_that_does_not_come_back_in_time_is_given_up(make_backend, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_client, "BACK_WITHIN_S", 0.2)
    monkeypatch.setattr(engine_client, "GIVEN_UP_AFTER", 1000)
    write_checkpoint(tmp_path / "own")
    backend = make_backend(folder=tmp_path / "own")
    (tmp_path / "own" / "refuse").touch()
    stream(backend, "die").wait()
    wait_until(lambda: backend.pb.unloaded[:1] == ["tiny"], 2)


def test_an_engine_that_cannot_start_says_why(make_backend):
    with pytest.raises(ConchError, match="the weights are of cheese"):
        make_backend(seed=REFUSES)
    with pytest.raises(ConchError, match="killed by signal 9"):
        make_backend(seed=DIES)


def test_unloading_ends_what_is_live(make_backend):
    threads_before = threading.active_count()
    backend = make_backend()
    senders = [stream(backend), stream(backend, "silent")]
    wait_until(lambda: senders[0].responses)
    began = time.monotonic()
    backend.close()
    assert time.monotonic() - began < 8
    for sender in senders:
        assert sender.wait().error.kind == "UNAVAILABLE"
        assert sender.finals == 1
    late = stream(backend).wait()
    assert late.error.kind == "UNAVAILABLE"
    wait_until(lambda: threading.active_count() == threads_before)


def test_termination_ends_what_is_live_before_the_server_does(make_backend):
    backend = make_backend()
    sender = stream(backend, "silent")
    before = signal.getsignal(signal.SIGTERM)
    watch = TerminationWatch(backend.drain)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert sender.wait().error.kind == "UNAVAILABLE"
        assert "shutting down" in stream(backend).wait().error.text
    finally:
        watch.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_nothing_of_triton_is_kept(make_backend):
    backend = make_backend()
    references = []
    for salt in ("", "fail", "silent", "die", ""):
        request = FakeRequest(
            text_input=TEXT, stream=True, cache_salt=salt, sampling_parameters={"max_tokens": 5}
        )
        references += [weakref.ref(request), weakref.ref(request.sender)]
        backend.execute([request])
        request.sender.cancelled = salt == "silent"
        request.sender.wait(20)
        del request
    bad = FakeRequest(text_input=TEXT, parameters={"temperature": "hot"})
    references += [weakref.ref(bad), weakref.ref(bad.sender)]
    backend.execute([bad])
    bad.sender.wait()
    del bad

    def all_gone():
        gc.collect()
        return not any(reference() for reference in references)

    wait_until(all_gone)
    backend.drain()
    late = FakeRequest(text_input=TEXT)
    backend.execute([late])
    reference = weakref.ref(late.sender.wait())
    del late
    wait_until(lambda: gc.collect() is not None and reference() is None)


def test_every_request_is_counted_once(make_backend):
    backend = make_backend()
    for _ in range(5):
        stream(backend, max_tokens=3).wait()
    for sampling in ({"temperature": "hot"}, {"top_p": 7}, {"nonsense": 1}, {"n": 99}):
        stream(backend, **sampling).wait()
    for _ in range(2):
        stream(backend, text="the " * 400).wait()
    for _ in range(3):
        sender = stream(backend, "silent")
        sender.cancelled = True
        sender.wait()
    names = ("request_success_total", "request_failure_total", "request_cancelled_total")
    wait_until(lambda: [backend.pb.value(name) for name in names] == [5, 6, 3])
    assert backend.pb.value("request_failure_total", reason="invalid_argument") == 6
    assert backend.pb.value("request_success_total", finished_reason="length") == 5
    wait_until(lambda: len(backend.pb.samples("e2e_request_latency_seconds")) == 8)
    assert backend.pb.samples("request_generation_tokens")[:5] == [3] * 5


def test_idle_costs_nothing(make_backend):
    backend = make_backend()
    stream(backend, max_tokens=3).wait()
    time.sleep(0.3)
    writes = sum(metric.writes for metric in backend.pb.page.values())
    began = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - began < 0.01
    assert sum(metric.writes for metric in backend.pb.page.values()) == writes


def test_a_server_without_metrics_serves(make_backend):
    backend = make_backend(FakePbUtils(metrics=False))
    assert stream(backend, max_tokens=3).wait().error is None
