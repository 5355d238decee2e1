"""Continuous batching over static batching, on requests whose lengths differ.

The peer is `transformers.generate` on a padded batch of the same size with the same weights, dtype and
threads: what one would write without an engine. Since it is another implementation too, the same engine with
a static policy is measured beside it; that ratio is due to the policy alone.
"""

from __future__ import annotations

import random
from statistics import median
from typing import Any

from loadgen.prompts import prompt

from serving_experiments.bench import Bench, as_requests, ratio_of_medians

OUTPUT_TOKENS = (20, 100, 300, 500)
PROMPT_TOKENS = (16, 32, 64, 128)
BATCH = 16
ROUNDS = 3


def workload(count: int, outputs: tuple[int, ...], seed: int) -> list[dict[str, Any]]:
    """Return requests with each output length equally often, in random order."""
    lengths = [outputs[index % len(outputs)] for index in range(count)]
    random.Random(seed).shuffle(lengths)
    prompts = [
        prompt(PROMPT_TOKENS[index % len(PROMPT_TOKENS)], 100_000 * seed + index) for index in range(count)
    ]
    return as_requests(prompts, lengths)


def measure(bench: Bench) -> dict[str, Any]:
    """Alternate the three for `ROUNDS` rounds; the work of a round is the same for all."""
    count = 8 if bench.quick else 2 * BATCH
    batch = 4 if bench.quick else BATCH
    outputs = (2, 4, 8, 12) if bench.quick else OUTPUT_TOKENS
    rounds = 1 if bench.quick else ROUNDS
    rates: dict[str, list[float]] = {"continuous": [], "static_transformers": [], "static_same_engine": []}
    with bench.engine(max_num_seqs=batch, enable_prefix_caching=False) as engine:
        static = bench.static(engine.ready["model_folder"])
        with static, bench.steps("continuous against static batching", 3 * rounds) as done:
            warm = workload(batch, (4,), seed=0)
            engine.ask({"requests": warm, "concurrency": batch})
            static.ask({"requests": warm, "batch_size": batch})
            for number in range(rounds):
                requests = workload(count, outputs, seed=number + 1)
                for name, program, question in (
                    ("continuous", engine, {"concurrency": batch, "policy": "continuous"}),
                    ("static_transformers", static, {"batch_size": batch}),
                    ("static_same_engine", engine, {"concurrency": batch, "policy": "static"}),
                ):
                    answer = program.ask({"requests": requests, **question})
                    rates[name].append(answer["tokens"] / answer["seconds"])
                    done()
    return {
        "continuous_over_static": ratio_of_medians(rates["continuous"], rates["static_transformers"]),
        "continuous_over_static_same_engine": ratio_of_medians(
            rates["continuous"], rates["static_same_engine"]
        ),
        "batch": batch,
        "requests_per_round": count,
        "output_tokens": outputs,
        "wanted_prompt_tokens": PROMPT_TOKENS,
        "dtype": static.ready["dtype"],
        "torch_threads": {"engine": engine.ready["torch_threads"], "static": static.ready["torch_threads"]},
        "tokens_per_s": {name: [round(rate, 2) for rate in values] for name, values in rates.items()},
        "median_tokens_per_s": {name: round(median(values), 2) for name, values in rates.items()},
    }
