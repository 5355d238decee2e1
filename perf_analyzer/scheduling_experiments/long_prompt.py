"""What readers of running streams feel while a prompt of 6,000 tokens arrives, over the wire.

`chunked` lets the scheduler choose how much of the prompt a step may take, so that running streams keep
their target: ``slo`` with `tpot_target_s`. `chunked_512` is the default, a fixed budget that is chosen for
throughput.
"""

from __future__ import annotations

from typing import Any

from serving_experiments import chunked_prefill
from serving_experiments.bench import Bench

LONG_PROMPT_TOKENS = 6_000
TPOT_TARGET_S = 0.016
MODES: chunked_prefill.Modes = (
    ("chunked", {"scheduler": "slo", "tpot_target_s": TPOT_TARGET_S}),
    ("chunked_512", {"enable_chunked_prefill": True}),
    ("unchunked", {"enable_chunked_prefill": False}),
)


def measure(bench: Bench) -> dict[str, Any]:
    """Play the scene of `chunked_prefill` with a longer prompt."""
    return chunked_prefill.measure(bench, MODES, LONG_PROMPT_TOKENS)
