"""Engines with each drafter, and what is told of their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from loadgen import machine
from loadgen.worker import Worker
from serving_experiments.bench import DEMO_MODEL, Bench

NONE = "none"
HEAD = machine.ROOT / "model_repository" / "speculative_eagle" / "smollm2" / "1" / "head"
SETTINGS = {
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 512 << 20,
    "enable_prefix_caching": False,
}
Answer = Mapping[str, Any]


def drafters(model: str) -> dict[str, dict[str, Any] | None]:
    """Return `speculative_config` by drafter, as far as there is one for this model; the first is without.

    The draft model of a GGUF file is that file itself, its weights as they are stored.
    """
    found: dict[str, dict[str, Any] | None] = {
        NONE: None,
        "ngram": {
            "method": "ngram",
            "num_speculative_tokens": 8,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        },
        "suffix": {"method": "suffix"},
    }
    if model.endswith(".gguf"):
        own = {"method": "draft_model", "model": model, "quantization": "gguf", "num_speculative_tokens": 3}
        found["draft_model"] = own
    if model == DEMO_MODEL and HEAD.is_dir():
        found["eagle"] = {"method": "eagle", "model": str(HEAD), "num_speculative_tokens": 3}
    return found


def recorded(configs: Mapping[str, Any]) -> dict[str, Any]:
    """Return configurations as they stand in the record: without the folder that the repository lies in."""
    return {
        name: config and {key: _in_repository(value) for key, value in config.items()}
        for name, config in configs.items()
    }


def _in_repository(value: Any) -> Any:  # noqa: ANN401
    return str(HEAD.relative_to(machine.ROOT)) if value == str(HEAD) else value


def engine(bench: Bench, speculative: Mapping[str, Any] | None) -> Worker:
    """Return an engine in a process of its own, started by entering it."""
    settings = bench.settings(model=bench.model_path, speculative_config=speculative, **SETTINGS)
    return Worker("speculation_worker.py", {"settings": settings})


def speed(answer: Answer) -> float:
    """Return tokens decoded per second."""
    return float(answer["tokens"] / answer["seconds"])


def speedup(answers: Sequence[Answer], without: Sequence[Answer]) -> float:
    """Return the median over rounds of the speed with drafts over that without, in the same round."""
    return round(median(speed(one) / speed(other) for one, other in zip(answers, without, strict=True)), 3)


def acceptance_length(answers: Sequence[Answer]) -> float | None:
    """Return how many tokens a row with drafts brought on average; None where there was none."""
    drafts = sum(answer["drafts"] for answer in answers)
    return round(1 + sum(answer["drafts_accepted"] for answer in answers) / drafts, 3) if drafts else None


def acceptance_by_position(answers: Sequence[Answer]) -> list[float]:
    """Return in what share of rows with drafts the first was right, the first two, and so on."""
    drafts = max(1, sum(answer["drafts"] for answer in answers))
    counts = [answer["accepted_by_position"] for answer in answers]
    depth = max(map(len, counts), default=0)
    return [round(sum(each[at] for each in counts if at < len(each)) / drafts, 3) for at in range(depth)]


def check_same_work(one: Answer, other: Answer, max_tokens: int) -> None:
    """Raise RuntimeError where a request has more or fewer tokens than were asked for."""
    lengths = {len(ids) for answer in (one, other) for ids in answer["token_ids"]}
    if lengths != {max_tokens}:
        raise RuntimeError(f"unequal work: {sorted(lengths)} tokens, asked {max_tokens}")


def agreement(one: Answer, other: Answer) -> float:
    """Return the share of tokens that come before the first that differs, over all requests.

    In 16 bits, steps of another size round otherwise, so that near ties may go either way.
    """
    same = total = 0
    for left, right in zip(one["token_ids"], other["token_ids"], strict=True):
        total += len(left)
        same += next((at for at, pair in enumerate(zip(left, right)) if pair[0] != pair[1]), len(left))  # noqa: B905
    return round(same / total, 3)
