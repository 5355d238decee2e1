"""Tokens that a prefix cache finds, over those that the best cache there can be would find.

The trace is of chats of several turns that share system prompts (`in_process/chat_trace.py`), on the real
scheduler, KV manager and prefix cache with a worker that answers at once. The oracle has endless memory and
finds the longest prefix to the token; like any cache it knows only what earlier steps have computed, and
never gives the last token of a prompt.

A cache of whole blocks loses what the oracle finds in the last, partly filled block: on average half a block
less half a token of each request, 7.5 tokens here. So ``hit_rate_over_oracle_in_blocks`` is against an
oracle that is rounded down in the same way; what is missing there is due to eviction, or to a fault.
"""

from __future__ import annotations

from typing import Any

from loadgen.worker import Worker
from serving_experiments.bench import Bench, ratio

CACHES = ("hash", "radix")
BLOCK_SIZE = 16
POOLS = {"ample": 1 << 16, "short": 1_500}
CHATS = 300
AT_ONCE = 32
SETTINGS = {
    "block_size": BLOCK_SIZE,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2_048,
    "max_model_len": 8_192,
}


def measure(bench: Bench) -> dict[str, Any]:
    """Play the same chats with each cache, with room for everything and with little."""
    count = 20 if bench.quick else CHATS
    found: dict[str, dict[str, dict[str, Any]]] = {pool: {} for pool in POOLS}
    with bench.steps("hit rate over an oracle", len(POOLS) * len(CACHES)) as done:
        for pool, blocks in POOLS.items():
            for cache in CACHES:
                settings = {**SETTINGS, "prefix_cache": cache, "num_gpu_blocks_override": blocks}
                with Worker("chat_worker.py", {}) as worker:
                    found[pool][cache] = worker.ask(
                        {"settings": settings, "chats": count, "at_once": AT_ONCE, "seed": 1}
                    )
                done()
    return {
        "hit_rate_over_oracle": over(found["ample"], "oracle"),
        "hit_rate_over_oracle_in_blocks": over(found["ample"], "oracle_in_blocks"),
        "hit_rate_over_oracle_short_pool": over(found["short"], "oracle"),
        "oracle_hit_rate": ratio(found["ample"][CACHES[0]]["oracle"], found["ample"][CACHES[0]]["prompt"]),
        "chats": count,
        "at_once": AT_ONCE,
        "pools": POOLS,
        "settings": SETTINGS,
        "sums": found,
    }


def over(sums: dict[str, dict[str, Any]], key: str) -> dict[str, float]:
    """Return what each cache found over what there was to find."""
    return {cache: ratio(one["found"], one[key]) for cache, one in sums.items()}
