"""More requests than there is room for, and the account of what became of each: F13, F14 and a burst."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from support.lab import CONTEXT, Lab, load
from support.leaving import GrpcLeaver, HttpLeaver
from support.oracle import Same
from support.server import wait_until
from support.wire import Answer, ServedModel

pytestmark = pytest.mark.e2e

LONG = {
    "text_input": "there is a house",
    "return_output_ids": True,
    "parameters": {"max_tokens": 15_000, "temperature": 0, "ignore_eos": True},
}
SHORT = {
    "text_input": "again and again",
    "parameters": {"max_tokens": 4, "temperature": 0, "ignore_eos": True},
}
QUEUE_TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def bounded(lab: Lab) -> Iterator[ServedModel]:
    """One request runs, four wait, for at most two seconds."""
    with lab.loaded("bounded") as model:
        yield model


@pytest.fixture
def running(bounded: ServedModel) -> Iterator[HttpLeaver]:
    """The one that runs, until it is told to leave."""
    client = HttpLeaver(bounded, LONG)
    client.read_events(2)
    yield client
    client.leave()


@dataclass(frozen=True)
class Timed:
    """An answer and the seconds it took."""

    answer: Answer
    took_s: float


def timed(ask: Callable[[], Answer]) -> Timed:
    began = time.monotonic()
    answer = ask()
    return Timed(answer, time.monotonic() - began)


def all_at_once(asks: Sequence[Callable[[], Answer]]) -> list[Timed]:
    with ThreadPoolExecutor(len(asks)) as pool:
        return list(pool.map(timed, asks))


@pytest.mark.parametrize("front_end", ["generate", "stream", "grpc"])
def test_a_full_queue_refuses_and_a_slow_one_times_out(
    lab: Lab, bounded: ServedModel, running: HttpLeaver, front_end: str
) -> None:
    ask = getattr(bounded, front_end)
    with lab.unharmed(bounded):
        ended = all_at_once([lambda: ask(SHORT)] * 8)
        refused = [one for one in ended if "queue is full" in one.answer.error]
        late = [one for one in ended if "timed out" in one.answer.error]
        assert (len(refused), len(late)) == (4, 4), [one.answer for one in ended]
        assert all(one.took_s < 1 and "max_queue_size is 4" in one.answer.error for one in refused)
        assert all(QUEUE_TIMEOUT_S <= one.took_s < QUEUE_TIMEOUT_S + 1 for one in late), ended
        # Triton's generate endpoints have no other status for an error that is the first response.
        assert all(one.answer.status in (None, 400) for one in ended), ended
        assert load(bounded)[0] == 1, "the first one should still run, or nothing was proved"
        assert_right_so_far(lab, running)
        running.leave()
        left_at = time.monotonic()
        assert ask(SHORT).error is None
        assert time.monotonic() - left_at < 2


def assert_right_so_far(lab: Lab, client: HttpLeaver) -> None:
    """What the client has got is the beginning of what transformers would say."""
    client.read_events(201)  # the last of them may not have come whole
    events = client.received[client.received.index(b"data:") :].decode(errors="replace")
    ids: list[int] = []
    for line in events.split("\n\n")[:200]:
        ids += as_list(json.loads(line[line.index("{") : line.rindex("}") + 1])["output_ids"])
    assert ids == lab.reference.ids(LONG["text_input"], len(ids))


def as_list(value: int | list[int]) -> list[int]:
    return value if isinstance(value, list) else [value]


def test_a_shorter_timeout_of_the_request_itself_is_kept(
    lab: Lab, bounded: ServedModel, running: HttpLeaver
) -> None:
    with lab.unharmed(bounded):
        queued = {**SHORT, "parameters": {**SHORT["parameters"], "timeout": 500_000}}
        for one in all_at_once([lambda: bounded.generate(queued), lambda: bounded.stream(queued)]):
            assert "timed out" in one.answer.error
            assert 0.5 <= one.took_s < 1.5
        running.leave()
        runs = {**LONG, "parameters": {**LONG["parameters"], "timeout": 500_000}}
        one = timed(lambda: bounded.stream(runs))
        assert "timed out" in one.answer.error and one.answer.output_ids
        assert 0.5 <= one.took_s < 1.5


# F13: every request is in exactly one of three counts.

COUNTS = ("request_success_total", "request_failure_total", "request_cancelled_total")
REJECTED = ({"temperature": "hot"}, {"top_p": 7}, {"nonsense": 1}, {"n": 0})


def test_every_request_is_counted_once(lab: Lab, tiny: ServedModel) -> None:
    before = [tiny.metric(name) for name in COUNTS]
    invalid = tiny.metric("request_failure_total", reason="invalid_argument")
    for _ in range(5):
        assert tiny.stream(SHORT).error is None
    for parameters in REJECTED:
        assert tiny.generate({**SHORT, "parameters": parameters}).error
    for _ in range(2):
        assert str(CONTEXT) in tiny.grpc({**SHORT, "text_input": "a " * 2 * CONTEXT}).error
    for leaver in (HttpLeaver, HttpLeaver, GrpcLeaver):
        client = leaver(tiny, {**LONG, "parameters": {"max_tokens": 3000, "ignore_eos": True}})
        client.read_events(2)
        client.leave()

    def grown() -> list[float]:
        return [tiny.metric(name) - had for name, had in zip(COUNTS, before, strict=True)]

    wait_until(lambda: sum(grown()) >= 14, 5, "counts")
    assert grown() == [5, 6, 3]
    assert tiny.metric("request_failure_total", reason="invalid_argument") == invalid + 6


# A burst.

BURST = 200


def test_a_burst_of_200_is_answered_rightly(lab: Lab, tiny: ServedModel) -> None:
    prompts = [f"house number {index} in the town" for index in range(BURST)]
    bodies = [{**SHORT, "text_input": prompt, "return_output_ids": True} for prompt in prompts]
    start = threading.Barrier(BURST)
    same = Same(lab.reference.oracle)

    def ask(index: int) -> Answer:
        start.wait(60)
        return (
            tiny.grpc(bodies[index], request_id=f"burst-{index}") if index % 2 else tiny.stream(bodies[index])
        )

    with lab.unharmed(tiny), ThreadPoolExecutor(BURST) as pool:
        answers = list(pool.map(ask, range(BURST)))
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer.error is None, answer.error
        assert set(answer.ids) <= {f"burst-{index}"}
        assert len(answer.output_ids) == 4
        same.check(lab.reference.tokenizer(prompt).input_ids, answer.output_ids)
    same.finish()
    lab.assert_whole_pool(tiny)
