"""Reads Triton's `/metrics`: the sum of a family over its labels, which is all that we need."""

from __future__ import annotations

import urllib.request
from collections import defaultdict
from collections.abc import Mapping

RUNNING = "conch:num_requests_running"
WAITING = "conch:num_requests_waiting"
KV_BLOCKS_USED = "conch:kv_blocks_used"
KV_TOKENS_USED = "conch:kv_tokens_used"
PREFIX_HITS = "conch:prefix_cache_hits_total"
GENERATION_TOKENS = "conch:generation_tokens_total"


def parse(text: str) -> dict[str, float]:
    """Return the sum of the samples of each name in Prometheus' text format."""
    totals: dict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name_and_labels, _, value = line.rpartition(" ")
            totals[name_and_labels.partition("{")[0]] += float(value)
    return dict(totals)


def fetch(url: str) -> dict[str, float]:
    """Return the metrics of a server, see `parse`."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return parse(answer.read().decode())


def read(metrics: Mapping[str, float], name: str) -> float:
    """Return one metric.

    Raises
    ------
    KeyError
        The server does not offer it; the message lists those of ours that it has.
    """
    for spelling in (name, name.removesuffix("_total")):
        if spelling in metrics:
            return metrics[spelling]
    ours = ", ".join(sorted(key for key in metrics if key.startswith("conch:")))
    raise KeyError(f"no metric {name!r}; the server has: {ours or 'none with the prefix conch:'}")
