"""What happened, added up here, and shown on Triton's own metrics page at most every 100 ms."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import Counter as Tally
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from conch.api.errors import ErrorCode
from conch.api.steps import FinishReason, Usage
from conch.engine.protocol import EngineStats
from conch.host import metric_names as names
from conch.host.pb import PbUtils

PERIOD_S = 0.1

Series = tuple[str, str | None]
"""Name of a counter, and the value of its label if it has one."""


@dataclass(slots=True)
class Batch:
    """Changes since the last flush."""

    counts: Tally[Series] = field(default_factory=Tally)
    gauges: dict[str, float] = field(default_factory=dict)
    samples: list[tuple[str, float]] = field(default_factory=list)


class Accounts:
    """Adds up what becomes of requests. Any thread may call it; one lock guards all of it.

    Every request is counted once: as a success, a failure, or cancelled. The engine's counters start at zero
    with each engine process; here they go on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._batch = Batch()
        self._last = EngineStats()
        self._has_been_up = False

    def succeeded(self, reason: FinishReason) -> None:
        """Count a request that was answered in full."""
        self._add({(names.SUCCESS, reason.value): 1})

    def failed(self, code: ErrorCode) -> None:
        """Count a request that ended with an error, or whose client left."""
        cancelled = code is ErrorCode.CANCELLED
        self._add({((names.CANCELLED, None) if cancelled else (names.FAILURE, code.value)): 1})

    def usage(self, usage: Usage) -> None:
        """Note what one finished choice took."""
        samples = [
            (names.PROMPT_TOKENS, float(usage.num_prompt)),
            (names.GENERATION_TOKENS, float(usage.num_output)),
            (names.QUEUE_TIME, usage.queue_s),
            (names.LATENCY, usage.total_s),
        ]
        if usage.ttft_s is not None:
            samples.append((names.TIME_TO_FIRST_TOKEN, usage.ttft_s))
            if usage.num_output > 1:
                mean_s = (usage.total_s - usage.ttft_s) / (usage.num_output - 1)
                samples.append((names.TIME_PER_OUTPUT_TOKEN, mean_s))
        with self._lock:
            self._batch.samples.extend(samples)
        self._changed.set()

    def stats(self, stats: EngineStats) -> None:
        """Take the engine's snapshot: gauges as they are, counters as what they grew by."""
        with self._lock:
            for name, key in names.FROM_STATS.items():
                grown = getattr(stats, key) - getattr(self._last, key)
                if grown > 0:
                    self._batch.counts[name, None] += grown
            for position, count in enumerate(stats.accepted_by_position):
                grown = count - sum(self._last.accepted_by_position[position : position + 1])
                if grown > 0:
                    self._batch.counts[names.ACCEPTED_BY_POSITION, str(position)] += grown
            self._last = stats
            self._batch.gauges.update(names.gauges_of(stats))
        self._changed.set()

    def engine_up(self) -> None:
        """Note that an engine process serves."""
        with self._lock:
            self._batch.gauges[names.READY] = 1
            if self._has_been_up:
                self._batch.counts[names.RESTARTS, None] += 1
            self._has_been_up = True
        self._changed.set()

    def engine_down(self) -> None:
        """Note that the engine process is gone, and with it all that it held."""
        with self._lock:
            pools = EngineStats(
                kv_blocks_total=self._last.kv_blocks_total, swap_blocks_total=self._last.swap_blocks_total
            )
            self._last = EngineStats()
            self._batch.gauges.update(names.gauges_of(pools))
            self._batch.gauges[names.READY] = 0
        self._changed.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until something has changed; returns whether it has."""
        return self._changed.wait(timeout_s)

    def wake(self) -> None:
        """Wake who waits for a change."""
        self._changed.set()

    def take(self) -> Batch:
        """Return the changes since the last call."""
        with self._lock:
            self._changed.clear()
            batch, self._batch = self._batch, Batch()
        return batch

    def _add(self, counts: Mapping[Series, int]) -> None:
        with self._lock:
            self._batch.counts.update(counts)
        self._changed.set()


class MetricsPage(Protocol):
    """Where metrics are shown."""

    def show(self, batch: Batch) -> None:
        """Apply changes."""


class NoMetricsPage:
    """The page of a server whose metrics are switched off."""

    def show(self, batch: Batch) -> None:
        """Do nothing."""


class TritonMetricsPage:
    """Metric families on Triton's page. Series are made at once, to be there at zero, or as told."""

    def __init__(self, pb_utils: PbUtils, labels: Mapping[str, str]) -> None:
        kinds = pb_utils.MetricFamily
        self._families: list[Any] = []  # a family must outlive its metrics
        self._makers: dict[Series, Callable[[], Any]] = {}
        self._counters: dict[Series, Any] = {}
        self._gauges: dict[str, Any] = {}
        self._histograms: dict[str, Any] = {}

        def family(name: str, description: str, kind: object) -> PbUtils:
            made = kinds(name=names.PREFIX + name, description=description, kind=kind)
            self._families.append(made)
            return made

        for name, counter in names.COUNTERS.items():
            counters = family(name, counter.description, kinds.COUNTER)
            for value in counter.values or (None,):
                extra = {counter.label: value} if counter.label and value else {}
                make = partial(counters.Metric, labels={**labels, **extra})
                self._makers[name, value] = make
                if counter.at_zero:
                    self._counters[name, value] = make()
        for name, description in names.GAUGES.items():
            self._gauges[name] = family(name, description, kinds.GAUGE).Metric(labels=dict(labels))
        for name, histogram in names.HISTOGRAMS.items():
            histograms = family(name, histogram.description, kinds.HISTOGRAM)
            self._histograms[name] = histograms.Metric(labels=dict(labels), buckets=list(histogram.buckets))

    def show(self, batch: Batch) -> None:
        """Apply changes."""
        for series, count in batch.counts.items():
            if series not in self._counters:
                self._counters[series] = self._makers[series]()
            self._counters[series].increment(count)
        for name, value in batch.gauges.items():
            self._gauges[name].set(value)
        for name, value in batch.samples:
            self._histograms[name].observe(value)


def open_metrics_page(pb_utils: PbUtils, labels: Mapping[str, str]) -> MetricsPage:
    """Return the page of this server, or none where it has metrics switched off."""
    try:
        return TritonMetricsPage(pb_utils, labels)
    except pb_utils.TritonModelException as error:
        if "metrics not supported" in str(error).lower():
            return NoMetricsPage()
        raise


class MetricsFlusher:
    """Carries accounts to the page, at most every `PERIOD_S`; sleeps while nothing changes."""

    def __init__(self, accounts: Accounts, page: MetricsPage) -> None:
        self._accounts = accounts
        self._page = page
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="conch-metrics", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Show what is left and end the thread."""
        self._closed.set()
        self._accounts.wake()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._accounts.wait()
            self._flush()
            self._closed.wait(PERIOD_S)
        self._flush()

    def _flush(self) -> None:
        try:
            self._page.show(self._accounts.take())
        except Exception:  # a page that cannot be written must not stop the serving
            traceback.print_exc(file=sys.stderr)
