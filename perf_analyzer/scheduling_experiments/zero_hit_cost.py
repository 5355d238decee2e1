"""What the prefix cache costs where it finds nothing: tokens a second with it over without.

Two engines with the real model take turns on prompts that nobody has sent before.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from loadgen.prompts import prompt
from serving_experiments.bench import Bench, as_requests

PROMPT_TOKENS = 256
OUTPUT_TOKENS = 64
REQUESTS = 32
CONCURRENCY = 16
ROUNDS = 7


def measure(bench: Bench) -> dict[str, Any]:
    """Alternate the two; who goes first changes from round to round."""
    rounds, count, output = (1, 4, 4) if bench.quick else (ROUNDS, REQUESTS, OUTPUT_TOKENS)
    rates: dict[str, list[float]] = {"on": [], "off": []}
    with (
        bench.engine(enable_prefix_caching=True) as on,
        bench.engine(enable_prefix_caching=False) as off,
        bench.steps("a cache that finds nothing", rounds) as done,
    ):
        engines = {"on": on, "off": off}
        hits = 0
        for number in range(rounds + 1):
            prompts = [prompt(PROMPT_TOKENS, 1_000 * number + index) for index in range(count)]
            question = {"requests": as_requests(prompts, [output] * count), "concurrency": CONCURRENCY}
            for name in ("on", "off") if number % 2 else ("off", "on"):
                answer = engines[name].ask(question)
                hits += answer["prefix_hits"]
                if number:  # the first round warms up
                    rates[name].append(answer["tokens"] / answer["seconds"])
            if number:
                done()
    if hits:
        raise RuntimeError(f"{hits} tokens were found in a cache that was to find nothing")
    return {
        "zero_hit_cost": cost(rates["on"], rates["off"]),
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": output,
        "requests_per_round": count,
        "tokens_per_s": {name: [round(rate, 2) for rate in values] for name, values in rates.items()},
    }


def cost(on: list[float], off: list[float]) -> float:
    """Return the median over rounds of tokens a second with the cache over without; 1 is free."""
    return round(median(one / other for one, other in zip(on, off, strict=True)), 4)
