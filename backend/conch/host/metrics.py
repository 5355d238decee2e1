"""What happened, added up here; `metrics_page` shows it."""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from conch.api.errors import ErrorCode
from conch.api.steps import FinishReason, Usage
from conch.engine.protocol import EngineStats
from conch.host import metric_names as names


class Series(NamedTuple):
    """One line of the metrics page.

    Attributes
    ----------
    value
        Of the label, where the metric has one of its own; of all of them, where it has several.
    replica
        Index of the engine that it is about; None for the model instance.
    """

    name: str
    value: str | tuple[str, ...] | None = None
    replica: int | None = None


@dataclass(slots=True)
class Batch:
    """Changes since the last flush."""

    counts: Tally[Series] = field(default_factory=Tally)
    gauges: dict[Series, float] = field(default_factory=dict)
    samples: list[tuple[str, float]] = field(default_factory=list)


class Accounts:
    """Adds up what becomes of requests. Any thread may call it; one lock guards all of it.

    Every request is counted once: as a success, a failure, or cancelled.

    Attributes
    ----------
    engines
        The account of each replica.
    """

    def __init__(self, num_replicas: int = 1) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._batch = Batch()
        self._ready: set[int] = set()
        self.engines = tuple(EngineAccount(self, replica) for replica in range(num_replicas))

    def succeeded(self, reason: FinishReason) -> None:
        """Count a request that was answered in full."""
        self.add({Series(names.SUCCESS, reason.value): 1})

    def failed(self, code: ErrorCode) -> None:
        """Count a request that ended with an error, or whose client left."""
        cancelled = code is ErrorCode.CANCELLED
        self.add({Series(names.CANCELLED) if cancelled else Series(names.FAILURE, code.value): 1})

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

    def ready(self, replica: int, is_ready: bool) -> None:
        """Note whether a replica serves."""
        with self._lock:
            (self._ready.add if is_ready else self._ready.discard)(replica)
            self._batch.gauges[Series(names.READY, replica=replica)] = is_ready
            self._batch.gauges[Series(names.REPLICAS_READY)] = len(self._ready)
        self._changed.set()

    def add(self, counts: Mapping[Series, float], gauges: Mapping[Series, float] | None = None) -> None:
        """Add to counters, and set gauges."""
        with self._lock:
            self._batch.counts.update(counts)
            self._batch.gauges.update(gauges or {})
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


class EngineAccount:
    """The numbers of one replica. Its engine's counters start at zero with each process; here they go on.

    Only the thread that hears the engine calls it.
    """

    def __init__(self, accounts: Accounts, replica: int) -> None:
        self._accounts = accounts
        self._replica = replica
        self._last = EngineStats()
        self._has_been_up = False

    def stats(self, stats: EngineStats) -> None:
        """Take the engine's snapshot: gauges as they are, counters as what they grew by."""
        counts: dict[Series, float] = {}
        for name, key in names.FROM_STATS.items():
            grown = getattr(stats, key) - getattr(self._last, key)
            if grown > 0:
                counts[self._series(name)] = grown
        for name, key in names.FROM_TUPLES.items():
            pairs = zip_longest(getattr(stats, key), getattr(self._last, key), fillvalue=0)
            for index, (count, last) in enumerate(pairs):
                if count > last:
                    counts[self._series(name, str(index))] = count - last
        counts.update(self._expert_counts(stats))
        self._last = stats
        self._accounts.add(counts, self._gauges(stats))

    def _expert_counts(self, stats: EngineStats) -> dict[Series, float]:
        counts: dict[Series, float] = {}
        last = dict(zip(self._last.experts.layers, self._last.experts.tokens, strict=True))
        for layer, tokens in zip(stats.experts.layers, stats.experts.tokens, strict=True):
            before = last.get(layer, (0,) * len(tokens))
            for expert, (count, counted) in enumerate(zip(tokens, before, strict=True)):
                if count > counted:
                    series = self._series(names.EXPERT_TOKENS, (str(layer), str(expert)))
                    counts[series] = count - counted
        return counts

    def engine_up(self) -> None:
        """Note that an engine process serves."""
        if self._has_been_up:
            self._accounts.add({self._series(names.RESTARTS): 1})
        self._has_been_up = True
        self._accounts.ready(self._replica, True)

    def engine_down(self) -> None:
        """Note that the engine process is gone, and with it all that it held."""
        pools = EngineStats(
            kv_blocks_total=self._last.kv_blocks_total, swap_blocks_total=self._last.swap_blocks_total
        )
        self._last = EngineStats()
        self._accounts.add({}, self._gauges(pools))
        self._accounts.ready(self._replica, False)

    def _gauges(self, stats: EngineStats) -> dict[Series, float]:
        return {self._series(name): value for name, value in names.gauges_of(stats).items()}

    def _series(self, name: str, value: str | tuple[str, ...] | None = None) -> Series:
        return Series(name, value, self._replica)
