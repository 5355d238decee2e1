"""Clients that go away: F06 and F36."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from support.lab import Lab, load
from support.leaving import GrpcLeaver, HttpLeaver
from support.server import wait_until
from support.wire import ServedModel, as_tensors

pytestmark = pytest.mark.e2e

PROMPT = "the river meets the sea"
MANY, SEVERAL = 3000, 48


def body(max_tokens: int, **more: object) -> dict[str, object]:
    return {
        "text_input": "there is a house",
        "parameters": {"max_tokens": max_tokens, "ignore_eos": True, **more},
    }


class Neighbour(threading.Thread):
    """Asks for the same answer again and again until told to stop; each must be right."""

    def __init__(self, lab: Lab, model: ServedModel) -> None:
        super().__init__(daemon=True)
        self._lab, self._model = lab, model
        self._expected = lab.reference.ids(PROMPT, SEVERAL)
        self._over = threading.Event()
        self.right, self.wrong = 0, []

    def __enter__(self) -> Neighbour:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join(60)

    def run(self) -> None:
        while not self._over.is_set():
            try:
                answer = self._lab.greedy_ids(self._model, PROMPT, SEVERAL)
            except Exception as error:  # told by the test, not by the thread
                answer = error
            if answer == self._expected:
                self.right += 1
            else:
                self.wrong.append(answer)


def leave_fifty_times(model: ServedModel) -> None:
    before = model.metric("request_cancelled_total")
    for _ in range(50):
        client = HttpLeaver(model, body(MANY))
        client.read_events(2)
        client.leave()
    wait_until(lambda: model.metric("request_cancelled_total") == before + 50, 5, "50 cancellations")


def leave_twenty_at_once(model: ServedModel) -> None:
    before = model.metric("request_cancelled_total")
    clients = [HttpLeaver(model, body(MANY)) for _ in range(20)]
    for client in clients:
        client.read_events(2)
    for client in clients:
        client.leave()
    wait_until(lambda: model.metric("request_cancelled_total") == before + 20, 5, "20 cancellations")


def leave_before_the_first_byte(model: ServedModel) -> None:
    for _ in range(20):
        HttpLeaver(model, body(MANY)).leave()


def leave_with_the_answer_unread(model: ServedModel) -> None:
    before = model.metric("request_success_total")
    clients = [HttpLeaver(model, body(8)) for _ in range(20)]
    wait_until(lambda: model.metric("request_success_total") >= before + 20, 20, "end of 20 answers")
    for client in clients:
        client.leave()


@pytest.mark.parametrize(
    "leave",
    [leave_fifty_times, leave_twenty_at_once, leave_before_the_first_byte, leave_with_the_answer_unread],
)
def test_a_reset_connection_harms_nobody(
    lab: Lab, tiny: ServedModel, leave: Callable[[ServedModel], None]
) -> None:
    with lab.unharmed(tiny), Neighbour(lab, tiny) as neighbour:
        wait_until(lambda: neighbour.right or neighbour.wrong, 30, "first answer of the neighbour")
        leave(tiny)
    assert neighbour.right > 1 and not neighbour.wrong
    lab.assert_whole_pool(tiny)


# F36: with room for one request, what clients have left behind must not keep others waiting.

BUDGET = 12_000
QUEUED = 5


@pytest.fixture(scope="module")
def single(lab: Lab) -> Iterator[ServedModel]:
    with lab.loaded("single") as model:
        yield model


@pytest.mark.parametrize("make", [HttpLeaver, GrpcLeaver], ids=["http stream", "grpc stream"])
def test_abandoned_requests_give_way_at_once(
    lab: Lab, single: ServedModel, make: Callable[..., HttpLeaver | GrpcLeaver]
) -> None:
    cancelled, generated = single.metric("request_cancelled_total"), single.metric("generation_tokens_total")
    with lab.unharmed(single):
        running = make(single, body(BUDGET))
        running.read_events(2)
        queued = [make(single, body(BUDGET)) for _ in range(QUEUED)]
        wait_until(lambda: load(single)[1] == QUEUED, 10, "queue of those who will leave")
        for client in (running, *queued):
            client.leave()
        left_at = time.monotonic()
        lab.assert_canary(single)
        assert time.monotonic() - left_at < 2
        wait_until(
            lambda: single.metric("request_cancelled_total") == cancelled + 1 + QUEUED, 5, "cancellations"
        )
    assert single.metric("generation_tokens_total") - generated < BUDGET / 2


def test_a_timeout_bounds_what_plain_generate_leaves_behind(lab: Lab, single: ServedModel) -> None:
    """Triton 2.51 does not tell that a client of /generate has left."""
    timed_out, generated = single.metric("request_failure_total", reason="timeout"), tokens(single)
    with lab.unharmed(single):
        clients = [HttpLeaver(single, body(BUDGET, timeout=1_000_000), "generate") for _ in range(1 + QUEUED)]
        wait_until(lambda: load(single)[:2] == (1, QUEUED), 10, "queue of those who will leave")
        for client in clients:
            client.leave()
        left_at = time.monotonic()
        lab.assert_canary(single)
        assert time.monotonic() - left_at < 1 + 2
    now = single.metric("request_failure_total", reason="timeout")
    assert now - timed_out == 1 + QUEUED
    assert tokens(single) - generated < BUDGET / 2


def test_unary_grpc_is_refused_and_not_left_hanging(lab: Lab, tiny: ServedModel) -> None:
    tensors, parameters = as_tensors(body(4))
    client = grpc.InferenceServerClient(tiny.server.grpc)
    with lab.unharmed(tiny), client, pytest.raises(InferenceServerException, match="decoupled"):
        client.infer("tiny", tensors, parameters=parameters, client_timeout=10)


def tokens(model: ServedModel) -> float:
    return model.metric("generation_tokens_total")
