"""Small models under explicit model control, and what must hold of them whatever is done to them."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from transformers import AutoTokenizer

from conch.host.serving.repository import ModelEntry, write_model
from support.oracle import Oracle
from support.server import RunningServer, wait_until
from support.tiny import tiny_checkpoint
from support.wire import ServedModel

LONGEST = 16_000
CONTEXT = 4096
"""Of `tiny`; its KV pool holds just as much, so that one request can fill it."""
CANARY = "one two three"
_COMMON = {"dtype": "float32", "num_threads": 1, "seed": 1}
SETTINGS = {
    "tiny": {"max_model_len": CONTEXT, "num_gpu_blocks_override": CONTEXT // 16},
    "single": {"max_num_seqs": 1, "kv_cache_memory_bytes": 16 << 20},
    "bounded": {
        "max_num_seqs": 1,
        "max_queue_size": 4,
        "queue_timeout_s": 2.0,
        "kv_cache_memory_bytes": 16 << 20,
    },
    "pieces": {"stream_interval": 4, "kv_cache_memory_bytes": 16 << 20},
}


def checkpoint() -> Path:
    """Return the weights that all of them serve."""
    return tiny_checkpoint("llama", max_position_embeddings=LONGEST)


def write_lab_models(repository: Path) -> None:
    """Write a model repository."""
    for name, settings in SETTINGS.items():
        write_model(repository, ModelEntry(name, {"model": str(checkpoint()), **_COMMON, **settings}))


class Reference:
    """REF(p, n) for texts."""

    def __init__(self) -> None:
        self.oracle = Oracle(checkpoint())
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint())

    def ids(self, prompt: str, count: int) -> list[int]:
        return self.oracle.greedy(self.tokenizer(prompt).input_ids, count)

    def text(self, prompt: str, count: int) -> str:
        return self.tokenizer.decode(self.ids(prompt, count), skip_special_tokens=True)


@dataclass(frozen=True)
class Pids:
    """Processes that must not be replaced."""

    stubs: frozenset[int]
    engines: frozenset[int]


class Lab:
    """The server, its models, and the truth about their weights."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.reference = Reference()

    @contextmanager
    def loaded(self, name: str) -> Iterator[ServedModel]:
        """Serve a model for a while.

        Its end is not waited for: the gRPC front end of Triton 2.51 loses track of about one in 300 streams
        that their clients cancel, and a model with such a stream is never unloaded.
        """
        self.load(name)
        try:
            yield ServedModel(self.server, name)
        finally:
            self.unload(name)

    def load(self, name: str) -> None:
        self._control(f"models/{name}/load")

    def unload(self, name: str) -> None:
        self._control(f"models/{name}/unload")

    def state(self, name: str) -> str:
        """Return what the repository index says; models that were never loaded have no state."""
        return next(entry.get("state", "") for entry in self._control("index") if entry["name"] == name)

    def wait_until_unloaded(self, name: str) -> None:
        wait_until(lambda: self.state(name) == "UNAVAILABLE", 30, f"end of {name}")

    def pids(self) -> Pids:
        return Pids(
            frozenset(p.pid for p in self.server.stubs()), frozenset(p.pid for p in self.server.engines())
        )

    @contextmanager
    def unharmed(self, model: ServedModel) -> Iterator[None]:
        """ALIVE and DRAINED after the block."""
        before = self.pids()
        yield
        self.assert_drained(model)
        self.assert_alive(model, before)

    def assert_alive(self, model: ServedModel, before: Pids) -> None:
        """ALIVE."""
        assert self.server.is_ready() and self.server.is_model_ready(model.name)
        now = self.pids()
        assert now == before, f"a process was replaced: {before}, now {now}"
        began = time.monotonic()
        self.assert_canary(model)
        assert time.monotonic() - began < 10

    def assert_canary(self, model: ServedModel) -> None:
        """Fail unless a fixed prompt is answered as transformers would."""
        assert self.greedy_ids(model, CANARY, 8) == self.reference.ids(CANARY, 8)

    def assert_drained(self, model: ServedModel) -> None:
        """DRAINED, by the metrics; `assert_whole_pool` proves it by use."""
        wait_until(lambda: not any(load(model)), 5, f"empty engine; running, waiting, blocks: {load(model)}")

    def assert_whole_pool(self, model: ServedModel) -> None:
        """Fail unless a request that needs every block of `tiny` is served."""
        (token,) = self.reference.tokenizer("a").input_ids
        answer = model.grpc(
            {
                "input_ids": [token] * (CONTEXT - 2),
                "parameters": {"max_tokens": 2, "ignore_eos": True},
                "return_num_output_tokens": True,
            }
        )
        assert answer.error is None and answer.num_output == 2, answer

    def greedy_ids(self, model: ServedModel, prompt: str, count: int) -> list[int]:
        """Return the served continuation of exactly `count` tokens."""
        answer = model.grpc(
            {
                "text_input": prompt,
                "return_output_ids": True,
                "parameters": {"max_tokens": count, "temperature": 0, "ignore_eos": True},
            }
        )
        assert answer.error is None, answer.error
        return answer.output_ids

    def _control(self, verb: str) -> list[dict]:
        request = urllib.request.Request(f"{self.server.http}/v2/repository/{verb}", b"{}", method="POST")
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read() or b"[]")


def load(model: ServedModel) -> tuple[float, float, float]:
    """Return requests that run and wait, and blocks in use."""
    names = ("num_requests_running", "num_requests_waiting", "kv_blocks_used")
    running, waiting, blocks = (model.metric(name) for name in names)
    return running, waiting, blocks


def cpu_s(processes: list[psutil.Process]) -> float:
    """Return the CPU time that processes have had."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)
