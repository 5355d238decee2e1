"""How well two stages are used, by the requests in flight.

Ideal is a pipeline whose slowest stage is never idle: `utilisation_of_ideal` is the time in which that stage
computed over the time that passed, `bubble_fraction` what all stages idled over what they had. Beside it the
same modules on one rank with as many threads as one stage has, and on one with as many as both.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from loadgen.worker import Worker
from serving_experiments.bench import Bench, ratio

STAGES = 2
IN_FLIGHT = (1, 2, 4, 8)
ROUNDS, SECONDS, WARM_UP_S = 3, 6.0, 1.0
ENGINES: dict[str, dict[str, object]] = {
    "pp2": {"pipeline_parallel_size": STAGES, "num_threads": 1},
    "one_rank_one_thread": {"model_impl": "transformers", "num_threads": 1},
    "one_rank_two_threads": {"model_impl": "transformers", "num_threads": STAGES},
}


def measure(bench: Bench) -> dict[str, Any]:
    """Serve with each number of requests in turn, several times; one engine at a time."""
    rounds, seconds = (1, 0.5) if bench.quick else (ROUNDS, SECONDS)
    found: dict[str, dict[str, dict[str, float]]] = {}
    with bench.steps("pipeline", len(ENGINES) * rounds * len(IN_FLIGHT)) as done:
        for name, own in ENGINES.items():
            settings = bench.settings(model=bench.model_path, enable_prefix_caching=False, **own)
            runs: dict[int, list[dict[str, float]]] = {count: [] for count in IN_FLIGHT}
            with Worker("pipeline_worker.py", {"settings": settings}) as worker:
                for _ in range(rounds):
                    for count in IN_FLIGHT:
                        asked = {"in_flight": count, "warm_up_s": WARM_UP_S, "seconds": seconds}
                        runs[count].append(figures_of(worker.ask(asked)))
                        done()
            found[name] = {str(count): medians(each) for count, each in runs.items()}
    return {**headline_of(found["pp2"]), "by_engine": found}


def headline_of(by_count: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return the figures that are told first."""
    most = str(IN_FLIGHT[-1])
    return {
        f"pp2_utilisation_of_ideal_{most}": by_count[most]["utilisation_of_ideal"],
        "bubble_fraction": {count: one["bubble_fraction"] for count, one in by_count.items()},
    }


def figures_of(run: Mapping[str, Any]) -> dict[str, float]:
    """Return what a run says of the engine, and of its stages if it has any."""
    seconds, stages_s = run["seconds"], run["stages_s"]
    figures = {
        "tokens_per_s": round(run["tokens"] / seconds, 1),
        "step_ms": round(1000 * seconds / run["steps"], 3),
    }
    if stages_s:
        figures["utilisation_of_ideal"] = ratio(max(stages_s), seconds)
        figures["bubble_fraction"] = round(1 - sum(stages_s) / len(stages_s) / seconds, 4)
        figures |= {f"stage_{number}_busy": ratio(busy, seconds) for number, busy in enumerate(stages_s)}
    return figures


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {key: median(run[key] for run in runs) for key in runs[0]}
