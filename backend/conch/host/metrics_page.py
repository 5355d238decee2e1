"""Triton's own metrics page, written at most every 100 ms."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from conch.host import metric_names as names
from conch.host.metrics import Accounts, Batch, Series
from conch.host.pb import PbUtils

PERIOD_S = 0.1


class MetricsPage(Protocol):
    """Where metrics are shown."""

    def show(self, batch: Batch) -> None:
        """Apply changes."""


class NoMetricsPage:
    """The page of a server whose metrics are switched off."""

    def show(self, batch: Batch) -> None:
        """Do nothing."""


class TritonMetricsPage:
    """Metric families on Triton's page. Series are made at once, to be there at zero, if not said otherwise.

    Parameters
    ----------
    labels
        Of what is about the whole model instance.
    replicas
        The label ``replica`` of what is about one engine, for each.
    """

    def __init__(self, pb_utils: PbUtils, labels: Mapping[str, str], replicas: Sequence[str]) -> None:
        kinds = pb_utils.MetricFamily
        self._families: list[Any] = []  # a family must outlive its metrics
        self._makers: dict[Series, Callable[[Series], Any]] = {}
        self._counters: dict[Series, Any] = {}
        self._gauges: dict[Series, Any] = {}
        self._histograms: dict[str, Any] = {}

        def family(name: str, description: str, kind: object) -> PbUtils:
            made = kinds(name=names.PREFIX + name, description=description, kind=kind)
            self._families.append(made)
            return made

        def subjects(name: str) -> dict[int | None, dict[str, str]]:
            if name not in names.OF_ENGINES:
                return {None: dict(labels)}
            return {index: {**labels, "replica": replica} for index, replica in enumerate(replicas)}

        for name, counter in names.COUNTERS.items():
            counters = family(name, counter.description, kinds.COUNTER)
            for replica, own in subjects(name).items():
                self._makers[Series(name, None, replica)] = partial(_make, counters, counter.labels, own)
                for value in (counter.values or (None,)) if counter.at_zero else ():
                    series = Series(name, value, replica)
                    self._counters[series] = _make(counters, counter.labels, own, series)
        for name, description in names.GAUGES.items():
            gauges = family(name, description, kinds.GAUGE)
            for replica, own in subjects(name).items():
                self._gauges[Series(name, replica=replica)] = gauges.Metric(labels=own)
        for name, histogram in names.HISTOGRAMS.items():
            histograms = family(name, histogram.description, kinds.HISTOGRAM)
            self._histograms[name] = histograms.Metric(labels=dict(labels), buckets=list(histogram.buckets))

    def show(self, batch: Batch) -> None:
        """Apply changes."""
        for series, count in batch.counts.items():
            if series not in self._counters:
                self._counters[series] = self._makers[series._replace(value=None)](series)
            self._counters[series].increment(count)
        for series, value in batch.gauges.items():
            self._gauges[series].set(value)
        for name, value in batch.samples:
            self._histograms[name].observe(value)


def _make(family: Any, names_of: Sequence[str], own: Mapping[str, str], series: Series) -> Any:  # noqa: ANN401
    """Make the metric of a series: its own labels, and those of whatever it is about."""
    values = (series.value,) if isinstance(series.value, str) else series.value or ()
    return family.Metric(labels={**own, **dict(zip(names_of, values, strict=True))})


def replica_names(instance: str, count: int) -> list[str]:
    """Return the label ``replica`` of each engine of an instance; a single one has the instance's name."""
    return [instance] if count == 1 else [f"{instance}/{index}" for index in range(count)]


def open_metrics_page(pb_utils: PbUtils, labels: Mapping[str, str], replicas: Sequence[str]) -> MetricsPage:
    """Return the page of this server, or none where it has metrics switched off."""
    try:
        return TritonMetricsPage(pb_utils, labels, replicas)
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
