"""KV memory that is allocated and holds nothing, against reserving each request's whole context.

Taken between every two steps of the engine in process, where the state is exact, and weighted by allocation.
The prefix cache is off: a block shared by two requests would count as used twice.
"""

from __future__ import annotations

from typing import Any

from serving_experiments.bench import Bench
from serving_experiments.static_batching import workload

CONCURRENCY = 16
OUTPUT_TOKENS = (20, 100, 300, 500)


def measure(bench: Bench) -> dict[str, Any]:
    """Serve requests of mixed lengths and sum occupancy over the steps."""
    count, outputs = (8, (2, 8, 16, 24)) if bench.quick else (2 * CONCURRENCY, OUTPUT_TOKENS)
    with bench.engine(enable_prefix_caching=False) as engine, bench.steps("KV occupancy", 1) as done:
        requests = workload(count, outputs, seed=77)
        answer = engine.ask({"requests": requests, "concurrency": CONCURRENCY, "sample_kv": True})
        done()
    kv = answer["kv"]
    return {
        "kv_waste_fraction": waste(kv["allocated"], kv["used"]),
        "kv_waste_fraction_whole_context": waste(kv["whole_context"], kv["used"]),
        "block_size": engine.ready["block_size"],
        "max_model_len": engine.ready["max_model_len"],
        "concurrency": CONCURRENCY,
        "requests": count,
        "output_tokens": outputs,
        "token_slots_summed_over_steps": kv,
    }


def waste(allocated: int, used: int) -> float:
    """Return the share of allocated token slots that hold nothing.

    Raises
    ------
    ValueError
        Nothing was allocated, or more is used than allocated: the samples are wrong.
    """
    if allocated <= 0 or not 0 <= used <= allocated:
        raise ValueError(f"{used} token slots used of {allocated} allocated")
    return round(1 - used / allocated, 4)
