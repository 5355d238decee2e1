"""What every test of the faults list uses: REF, ALIVE, DRAINED, and healthy streams beside bad inputs."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil
import torch

from support.fault_models import SMALL_POOL_TOKENS, checkpoints, smollm2_folder
from support.oracle import Oracle
from support.server import RunningServer, wait_until
from support.wire import ASKS_FOR_ALL, Answer, ServedModel

CANARY_TOKENS = 8
CANARY_WITHIN_S = 10
DRAINED_WITHIN_S = 5
STALE_S = 0.2
"""What the metrics page may lag behind, twice its period."""
GREEDY = {"temperature": 0, "ignore_eos": True}

Front = Callable[[ServedModel, Mapping[str, object]], Answer]
FRONTS: dict[str, Front] = {
    "generate": ServedModel.generate,
    "generate_stream": ServedModel.stream,
    "grpc": ServedModel.grpc,
}


@dataclass(frozen=True)
class Known:
    """A prompt and its REF, whose every choice is clear by a margin."""

    prompt: list[int]
    answer: list[int]


def known_answers(
    oracle: Oracle, count: int, *, lengths: Sequence[int], num_output: int, seed: int, margin: float = 1e-2
) -> list[Known]:
    """Draw prompts of these lengths, in turn, until there are enough with clear answers."""
    rng = random.Random(seed)
    vocab = oracle.model.config.vocab_size
    found: list[Known] = []
    while len(found) < count:
        prompt = [rng.randrange(3, vocab) for _ in range(lengths[len(found) % len(lengths)])]
        answer = oracle.greedy(prompt, num_output)
        if least_margin(oracle, prompt, answer) > margin:
            found.append(Known(prompt, answer))
    return found


def least_margin(oracle: Oracle, prompt: list[int], answer: list[int]) -> float:
    """Return the smallest lead of the likeliest token over the next."""
    top = oracle.logits([*prompt, *answer])[len(prompt) - 1 : -1].topk(2, dim=1).values
    return float(torch.min(top[:, 0] - top[:, 1]))


def body(prompt: str | Sequence[int], sampling: Mapping[str, object], **inputs: object) -> dict[str, object]:
    """Build a request that asks for all outputs; the sampling parameters go as serialized JSON."""
    said = {"text_input": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    asks = dict.fromkeys(ASKS_FOR_ALL, True)
    exclude = {"exclude_input_in_output": True}
    return {**said, **asks, **exclude, "sampling_parameters": json.dumps(dict(sampling)), **inputs}


def wait_for_metric(model: ServedModel, name: str, value: float, **labels: str) -> None:
    """Wait until the metrics page, which lags behind a little, shows a value."""
    wait_until(lambda: model.metric(name, **labels) == value, DRAINED_WITHIN_S, f"{value:g} {name}")


class FaultServer:
    """The running server, with what was true of it at the start."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self._oracles: dict[str, Oracle] = {}
        self._processes = [server.tritonserver(), *server.stubs(), *server.engines()]
        assert len(self._processes) == 1 + 2 * len(checkpoints())

    def model(self, name: str) -> ServedModel:
        return ServedModel(self.server, name)

    def oracle(self, name: str) -> Oracle:
        folder = str(smollm2_folder()) if name == "smollm2" else checkpoints()[name]
        if folder not in self._oracles:
            self._oracles[folder] = Oracle(Path(folder))
        return self._oracles[folder]

    @cached_property
    def canary(self) -> Known:
        return known_answers(self.oracle("tiny"), 1, lengths=[10], num_output=CANARY_TOKENS, seed=1)[0]

    def assert_alive(self) -> None:
        """ALIVE: ready, the same processes as at the start, and a canary that is right in time."""
        assert self.server.is_ready()
        for process in self._processes:
            assert process.is_running() and process.status() != psutil.STATUS_ZOMBIE, "a process ended"
        began = time.monotonic()
        answer = self.model("tiny").stream(
            body(self.canary.prompt, {**GREEDY, "max_tokens": CANARY_TOKENS}), CANARY_WITHIN_S
        )
        assert answer.error is None and answer.output_ids == self.canary.answer
        assert time.monotonic() - began < CANARY_WITHIN_S

    def assert_drained(self, name: str) -> None:
        """DRAINED: nothing runs, waits or holds KV; in the small pool, all of it is there for one request."""
        time.sleep(STALE_S)
        model = self.model(name)
        gauges = ("num_requests_running", "num_requests_waiting", "kv_blocks_used")
        wait_until(
            lambda: not any(model.metric(gauge) for gauge in gauges), DRAINED_WITHIN_S, f"drained {name}"
        )
        if name == "small_pool":
            whole = body([9] * (SMALL_POOL_TOKENS - 1), {"max_tokens": 5, "temperature": 0})
            answer = model.stream(whole)
            assert answer.error is None and answer.num_output == 1

    @contextmanager
    def healthy_streams(self, name: str, count: int = 3, num_output: int = 24) -> Iterator[None]:
        """Keep greedy streams going meanwhile; each must equal REF, and all must have run beside."""
        known = known_answers(self.oracle(name), count, lengths=[5, 20, 9], num_output=num_output, seed=77)
        streams = [_Healthy(self.model(name), one) for one in known]
        wait_until(lambda: all(stream.num_right or stream.wrong for stream in streams), 60, "healthy streams")
        before = [stream.num_right for stream in streams]
        try:
            yield
        finally:
            for stream in streams:
                stream.leave.set()
            for stream in streams:
                stream.join(60)
        for stream, had in zip(streams, before, strict=True):
            assert stream.wrong is None, f"a healthy stream got {stream.wrong}"
            assert stream.num_right > had, "no healthy stream ran beside the others"


class _Healthy(threading.Thread):
    def __init__(self, model: ServedModel, known: Known) -> None:
        super().__init__(daemon=True)
        self._model, self._known = model, known
        self.leave = threading.Event()
        self.num_right = 0
        self.wrong: object = None
        self.start()

    def run(self) -> None:
        wanted = body(self._known.prompt, {**GREEDY, "max_tokens": len(self._known.answer)})
        while not self.leave.is_set() and self.wrong is None:
            try:
                answer = self._model.stream(wanted)
            except OSError as error:
                self.wrong = error
                return
            if answer.error is not None or answer.output_ids != self._known.answer:
                self.wrong = answer
            else:
                self.num_right += 1
