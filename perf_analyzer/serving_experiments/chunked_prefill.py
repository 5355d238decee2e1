"""What readers of running streams feel while a long prompt arrives, with and without chunked prefill.

A few streams decode. After a quiet stretch, long prompts arrive one after another. Gaps between tokens that
overlap a prompt's prefill (from sending it to its first token) are compared with those of the quiet stretch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from loadgen.grpc_client import LoadClient, greedy
from loadgen.latency import Arrival, Trace, percentile, spread_ms
from loadgen.prompts import prompt

from serving_experiments.bench import Bench, ratio

STREAMS = 4
LONG_PROMPTS = 3
PAUSE_S = 0.5
PROMPT_TOKENS = 32
STREAM_TOKENS = 8_000  # more than the scene needs: streams are left when it is over
LONG_PROMPT_TOKENS = 4_000
Modes = tuple[tuple[str, dict[str, object]], ...]
MODES: Modes = (
    ("chunked", {"enable_chunked_prefill": True}),
    ("chunked_128", {"enable_chunked_prefill": True, "max_num_batched_tokens": 128}),
    ("unchunked", {"enable_chunked_prefill": False}),
)


@dataclass(frozen=True)
class Observation:
    """Streams that were decoding, and the long requests that came in between."""

    streams: Sequence[Trace]
    longs: Sequence[Trace]

    def quiet_gaps(self, from_s: float) -> list[float]:
        """Return the gaps, in seconds, between `from_s` and the first long prompt."""
        first_long_s = self.longs[0].sent_s
        return [
            b.at_s - a.at_s
            for trace in self.streams
            for a, b in pairwise(trace.arrivals)
            if a.at_s >= from_s and b.at_s <= first_long_s
        ]

    def busy_gaps(self) -> list[float]:
        """Return the gaps, in seconds, that overlap the prefill of a long prompt."""
        return [
            gap
            for long in self.longs
            for trace in self.streams
            for gap in trace.gaps(long.sent_s, long.arrivals[0].at_s)
        ]

    def timeline(self) -> list[tuple[float, float]]:
        """Return ``(seconds since the first long prompt, gap in ms)`` of one stream."""
        times = [arrival.at_s for arrival in self.streams[0].arrivals]
        zero = self.longs[0].sent_s
        return [(round(b - zero, 4), round(1e3 * (b - a), 3)) for a, b in pairwise(times)]


class Gate:
    """Opens once each of `count` streams has brought `tokens` tokens."""

    def __init__(self, count: int, tokens: int) -> None:
        self._left = [tokens] * count
        self.opened = asyncio.Event()
        self.opened_s = 0.0

    def watch(self, index: int, arrival: Arrival) -> None:
        """Count what came on a stream."""
        self._left[index] -= arrival.num_tokens
        if not self.opened.is_set() and max(self._left) <= 0:
            self.opened_s = time.perf_counter()
            self.opened.set()


async def observe(client: LoadClient, long_tokens: int, quiet_tokens: int) -> dict[str, Any]:
    """Run one scene against one server and return its figures."""
    over = asyncio.Event()
    started, quiet_over = Gate(STREAMS, 8), Gate(STREAMS, 8 + quiet_tokens)

    async def decode(index: int) -> Trace:
        def watch(arrival: Arrival) -> None:
            started.watch(index, arrival)
            quiet_over.watch(index, arrival)

        request = greedy(prompt(PROMPT_TOKENS, 50 + index), STREAM_TOKENS)
        return await client.stream(request, on_arrival=watch, leave_when=lambda _: over.is_set())

    streams = [asyncio.create_task(decode(index)) for index in range(STREAMS)]
    await asyncio.wait(
        [asyncio.create_task(quiet_over.opened.wait()), *streams], return_when=asyncio.FIRST_COMPLETED
    )
    longs = []
    for index in range(LONG_PROMPTS):
        longs.append(await client.stream(greedy(prompt(long_tokens, 900 + index), 2)))
        await asyncio.sleep(PAUSE_S)
    still_decoding = sum(not stream.done() for stream in streams)
    over.set()
    traces = await asyncio.gather(*streams)
    errors = [trace.error for trace in (*traces, *longs) if trace.error]
    if errors or still_decoding < STREAMS:
        raise RuntimeError(
            f"the scene fell apart: {still_decoding} of {STREAMS} streams outlasted it; {errors}"
        )
    seen = Observation(traces, longs)
    quiet, busy = seen.quiet_gaps(started.opened_s), seen.busy_gaps()
    return {
        "itl_p99_over_quiet": ratio(percentile(busy, 99), percentile(quiet, 99)),
        "quiet_itl_ms": spread_ms(quiet),
        "busy_itl_ms": spread_ms(busy),
        "quiet_gaps": len(quiet),
        "busy_gaps": len(busy),
        "long_ttft_ms": spread_ms([trace.ttft_s for trace in longs if trace.ttft_s is not None]),
        "long_prompt_tokens": [trace.num_prompt for trace in longs],
        "timeline": seen.timeline(),
    }


def measure(bench: Bench, modes: Modes = MODES, long_tokens: int = LONG_PROMPT_TOKENS) -> dict[str, Any]:
    """Play the same scene on a server for each mode; the modes `chunked` and `unchunked` are among them."""
    long_tokens, quiet_tokens = (400, 10) if bench.quick else (long_tokens, 100)
    results = {}
    with bench.steps("a long prompt arrives", len(modes)) as done:
        for name, settings in modes:
            with bench.server(**settings) as server:
                results[name] = bench.with_client(
                    server, lambda client: observe(client, long_tokens, quiet_tokens)
                )
            done()
    return {
        "itl_p99_chunked_over_quiet": results["chunked"]["itl_p99_over_quiet"],
        "itl_p99_unchunked_over_quiet": results["unchunked"]["itl_p99_over_quiet"],
        "streams": STREAMS,
        "modes": results,
    }
