"""Ours against vLLM's CPU build where both look drafts up in the prompt: one stream that copies text.

vLLM has the venv and the settings that it has in `make bench-peers`, and Intel's OpenMP loaded first, as it
advises where it speculates; both have the same numbers of tokens to match and to draft. The two are in memory
together and take turns; who waits is stopped.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from peers import venvs, weights
from peers.engines import ENGINES, OURS, PEERS
from peers.process import Program
from peers.rounds import ask
from peers.workloads import BY_KEY, agreement
from serving_experiments.bench import Bench

VLLM = "vllm"
LOOKUP = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
ROUNDS = 9
START_TIMEOUT_S = 900.0
"""vLLM compiles more where it speculates."""


def measure(bench: Bench) -> dict[str, Any]:
    """Alternate the two; who goes first changes from round to round."""
    venvs.install(next(peer for peer in PEERS if peer.name == VLLM))
    models = weights.prepare(bench.model_path, set())
    rounds, workload = (1 if bench.quick else ROUNDS), BY_KEY["w5"]
    figures: dict[str, list[float]] = {OURS: [], VLLM: []}
    same = []
    with (
        program("conch-16bit", models) as ours,
        program(VLLM, models) as vllm,
        bench.steps("against vLLM's ngram", 2 * (rounds + 1)) as done,
    ):
        programs = {OURS: ours, VLLM: vllm}
        for number in range(rounds + 1):
            work = workload.work(number, bench.quick)
            answers = {}
            for name in (OURS, VLLM) if number % 2 else (VLLM, OURS):
                answers[name] = ask(programs[name], workload, work)
                done()
            if number:  # the first round warms up
                same.append(agreement(answers[OURS].token_ids, answers[VLLM].token_ids))
                for name, answer in answers.items():
                    figures[name].append(workload.figure(work, answer))
    pairs = zip(figures[OURS], figures[VLLM], strict=True)
    return {
        "over_vllm_ngram": round(median(mine / theirs for mine, theirs in pairs), 3),
        "lookup": LOOKUP,
        "vllm_versions": venvs.versions_of(VLLM),
        "same_tokens": [round(share, 3) for share in same],
        "tokens_per_s": {name: [round(rate, 1) for rate in rates] for name, rates in figures.items()},
    }


def program(name: str, models: weights.Models) -> Program:
    """Return an engine of `bench-peers`, told to draft; started by entering it."""
    engine = next(engine for engine in ENGINES if engine.name == name)
    options: dict[str, Any] = {**engine.options, "model": models.paths[engine.model]}
    python, variables = venvs.python_of(engine.peer), engine.variables
    if engine.peer == OURS:
        options["settings"] = {**options["settings"], "speculative_config": LOOKUP}
    else:
        options["speculative_config"] = LOOKUP
        found = [str(path) for path in python.parents[1].glob("lib/libiomp5.so")]
        variables = {**variables, "LD_PRELOAD": ":".join(found)}
    return Program(python, engine.program, options, variables, START_TIMEOUT_S)
