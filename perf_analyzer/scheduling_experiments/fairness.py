"""Tokens served to two tenants of which one sends ten times as much, against the bound of the VTC paper.

Sheng et al., "Fairness in Serving Large Language Models" (OSDI '24): between two tenants who both have
requests waiting, the service that either gets in any stretch of time differs by at most ``2 max(wp L, wq
M)``: `L` is the longest prompt, `M` the tokens that fit into a running batch, and service counts a prompt
token as `wp` = 1 and an output token as `wq` = 2. A prompt counts when its request is admitted, an output
token when it comes.

The one who sends much has queued everything when the other begins, so that first come, first served makes
the other wait for all of it; that is measured beside.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from loadgen.worker import Worker
from serving_experiments.bench import Bench, ratio

SCHEDULERS = ("fair", "fcfs")
HEAVY, LIGHT = "heavy", "light"
LIGHT_REQUESTS = 60
TIMES = 10
PROMPT_TOKENS = (32, 512)
OUTPUT_TOKENS = (16, 128)
WEIGHTS = (1, 2)
LAW = {"step_s": 0.008, "token_s": 0.00028}
SETTINGS = {
    "block_size": 16,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "max_model_len": 1_024,
    "num_gpu_blocks_override": 1_024,
}
Line = dict[str, list[int]]


def measure(bench: Bench) -> dict[str, Any]:
    """Play the same arrivals with each scheduler on a simulated engine."""
    sent = arrivals(8 if bench.quick else LIGHT_REQUESTS)
    gaps: dict[str, float] = {}
    with bench.steps("fairness", len(SCHEDULERS)) as done:
        for scheduler in SCHEDULERS:
            options = {"settings": {**SETTINGS, "scheduler": scheduler}, "law": LAW}
            with Worker("arrivals_worker.py", options) as worker:
                answer = worker.ask({"arrivals": sent})
            if answer["preemptions"]:
                raise RuntimeError("requests were preempted: the bound is for a pool that never runs short")
            gaps[scheduler] = service_gap(answer["ledger"])
            done()
    limit = bound()
    return {
        "fair_service_gap_over_bound": ratio(gaps["fair"], limit),
        "fcfs_service_gap_over_bound": ratio(gaps["fcfs"], limit),
        "bound": limit,
        "service_gaps": gaps,
        "requests": {HEAVY: TIMES * len(sent) // (TIMES + 1), LIGHT: len(sent) // (TIMES + 1)},
        "law": LAW,
        "settings": SETTINGS,
    }


def arrivals(light: int) -> list[dict[str, Any]]:
    """Return both tenants' requests: everything of the heavy one at once, then all of the light one."""
    draw = random.Random(f"fairness {light}")
    return [
        {
            "at_s": at_s,
            "prompt": draw.randint(*PROMPT_TOKENS),
            "output": draw.randint(*OUTPUT_TOKENS),
            "tenant": tenant,
            "ttft_target_s": None,
            "tpot_target_s": None,
        }
        for tenant, count, at_s in ((HEAVY, TIMES * light, 0.0), (LIGHT, light, 0.5))
        for _ in range(count)
    ]


def bound() -> int:
    """Return the most by which service may differ; seats and pool bound what fits into a batch."""
    longest = PROMPT_TOKENS[1] + OUTPUT_TOKENS[1]
    pool = SETTINGS["num_gpu_blocks_override"] * SETTINGS["block_size"]
    batch = min(pool, SETTINGS["max_num_seqs"] * longest)
    return 2 * max(WEIGHTS[0] * PROMPT_TOKENS[1], WEIGHTS[1] * batch)


def service_gap(ledger: Sequence[Line]) -> float:
    """Return the most by which service differs over any stretch in which both have requests waiting.

    The difference since the beginning rises and falls; over a stretch it changes by at most its range.

    Raises
    ------
    ValueError
        There is no such stretch.
    """
    widest: float | None = None
    low = high = 0.0
    is_inside = False
    for line in ledger:
        if all(line.get(tenant, [0, 0, 0])[2] > 0 for tenant in (HEAVY, LIGHT)):
            ahead = service(line, HEAVY) - service(line, LIGHT)
            low, high = (min(low, ahead), max(high, ahead)) if is_inside else (ahead, ahead)
            widest = max(widest or 0.0, high - low)
            is_inside = True
        else:
            is_inside = False
    if widest is None:
        raise ValueError("the two tenants never had requests waiting at the same time")
    return widest


def service(line: Line, tenant: str) -> float:
    """Return what a tenant has been served so far."""
    prompt, output, _ = line[tenant]
    return WEIGHTS[0] * prompt + WEIGHTS[1] * output
