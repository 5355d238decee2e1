"""Bytes that ranks put into collectives for each token, counted on real ranks, over the formula.

The formula is what `conch topology` predicts with (`conch.model.mesh.traffic`). It must be exact: 1. Only
with experts it takes routers to be even, which those of random weights are not quite.
"""

from __future__ import annotations

from typing import Any

from loadgen.worker import Worker
from serving_experiments.bench import Bench, ratio

DENSE, WITH_EXPERTS = {"model": "demo:llama"}, {"model": "demo:mixtral"}
STAGES = {"pipeline_parallel_size": 2, "pipeline_layers": [2, 2]}
TOPOLOGIES: dict[str, dict[str, object]] = {
    "tp2": {**DENSE, "tensor_parallel_size": 2},
    "tp4": {**DENSE, "tensor_parallel_size": 4},
    "pp2": {**DENSE, **STAGES},
    "tp2_pp2": {**DENSE, **STAGES, "tensor_parallel_size": 2},
    "ep2": {**WITH_EXPERTS, "expert_parallel_size": 2},
    "ep4": {**WITH_EXPERTS, "expert_parallel_size": 4},
    "tp2_ep2": {**WITH_EXPERTS, "expert_parallel_size": 2, "tensor_parallel_size": 2},
}
REQUESTS, PROMPT, OUTPUTS = 8, 48, 16


def measure(bench: Bench) -> dict[str, Any]:
    """Serve the same requests with each topology."""
    found = {}
    asked = {"requests": REQUESTS, "prompt": PROMPT, "outputs": 2 if bench.quick else OUTPUTS}
    with bench.steps("bytes per token", len(TOPOLOGIES)) as done:
        for name, settings in TOPOLOGIES.items():
            with Worker("traffic_worker.py", {}) as worker:
                found[name] = worker.ask({**asked, "settings": settings})
            done()
    tokens = REQUESTS * (PROMPT + asked["outputs"] - 1)
    return {
        "bytes_per_token_over_formula": {name: over(one) for name, one in found.items()},
        "bytes_per_token": {
            name: {kind: round(count / tokens) for kind, count in one["counted"].items()}
            for name, one in found.items()
        },
        "requests": asked,
        "details": found,
    }


def over(one: dict[str, Any]) -> float:
    """Return bytes of all kinds over those of the formula."""
    return ratio(sum(one["counted"].values()), sum(one["formula"].values()))
