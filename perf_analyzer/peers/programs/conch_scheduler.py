"""What our engine's host side costs, without a model. Options: ``{"settings": {... model.json ...}}``.

Timed are arrival, plan, apply and commit: scheduler, KV manager, prefix cache and request table.
"""

from __future__ import annotations

import gc
import time
from typing import Any

from lines import serve
from modelless import build_modelless
from planning_runs import Run, answer
from planning_trace import Job

from conch.api.sampling import SamplingParams
from conch.engine.protocol import AddRequest, CancelRequest


class ConchHost:
    """Our engine as `planning_runs` drives it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._engine, self._worker = build_modelless(settings)
        self._alive: dict[int, None] = {}
        self._next_id = 0

    def prepare(self, job: Job) -> AddRequest:
        """Return the message that brings a request, as it leaves the socket."""
        self._next_id += 1
        params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)
        return AddRequest(request_id=self._next_id, token_ids=job.token_ids, params=params)

    def step(self, arrivals: list[AddRequest]) -> Run:
        """Take in what arrived and do one step."""
        elsewhere = self._worker.seconds
        began = time.perf_counter()
        for message in arrivals:
            self._engine.add(message)
        outputs = self._engine.step()
        took = time.perf_counter() - began - (self._worker.seconds - elsewhere)
        self._alive.update(dict.fromkeys(message.request_id for message in arrivals))
        ended = [output.request_id for output in outputs if output.finish_reason is not None]
        for request_id in ended:
            del self._alive[request_id]
        return Run(took, sum(len(output.token_ids) for output in outputs), len(ended))

    def clear(self) -> None:
        """End all requests."""
        for request_id in self._alive:
            self._engine.cancel(CancelRequest(request_id))
        self._alive.clear()
        self._engine.step()

    def counts(self) -> dict[str, int]:
        """Return what shows that the trace was served as it was meant."""
        stats = self._engine.stats()
        return {
            "hit_tokens": stats.prefix_hits,
            "preemptions": stats.preemptions,
            "blocks": stats.kv_blocks_total,
        }


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Build the engine."""
    host = ConchHost(options["settings"])
    gc.collect()
    gc.freeze()  # as the engine process does
    return {}, lambda question: answer(host, question)


if __name__ == "__main__":
    serve(start)
