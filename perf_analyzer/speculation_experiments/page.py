"""The page on speculation: its figures, written anew from each recorded run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen import machine

PAGE = machine.ROOT / "perf_analyzer" / "speculation.md"
BEGIN, END = "<!-- figures: written by `make bench-speculation` -->", "<!-- end of figures -->"
_PAYS = 1.02


def rewrite(results: Mapping[str, Any], record: Path, page: Path = PAGE) -> None:
    """Replace the figures of the page by those of a run; parts that were not run are left out."""
    text = page.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n{figures(results, record)}\n{END}{tail}")


def figures(results: Mapping[str, Any], record: Path) -> str:
    """Return the figures of a run as Markdown."""
    parts = [f"From `{record.parent.name}/{record.name}`."]
    if "drafters" in results:
        parts += ["### Gains with back-off", *_gains(results["drafters"])]
    if "vllm_ngram" in results:
        found = results["vllm_ngram"]
        parts += [
            "### Against vLLM",
            f"One stream that copies, both with `ngram` and the same lookup: {found['over_vllm_ngram']:.2f} "
            "times vLLM's tokens/s.",
        ]
    if "batch_and_k" in results:
        parts += ["### Batch size and k, no back-off", *_by_batch(results["batch_and_k"])]
    return "\n\n".join(parts)


def _gains(found: Mapping[str, Any]) -> list[str]:
    rows = []
    for drafter, by_kind in found["speedup"].items():
        for kind, gains in by_kind.items():
            lengths = found["acceptance_length"][drafter][kind]
            shares = found["details"][drafter][kind]["c1"]["acceptance_by_position"]
            rows.append(
                (
                    f"`{drafter}`",
                    kind,
                    *(_number(gains[count]) for count in ("c1", "c16")),
                    *(_number(lengths[count]) for count in ("c1", "c16")),
                    ", ".join(f"{share:.2f}" for share in shares),
                )
            )
    heading = (
        "drafter",
        "work",
        "1 stream",
        "16 streams",
        "length, 1 stream",
        "length, 16 streams",
        "accepted up to each position, 1 stream",
    )
    return [_table(heading, rows)]


def _by_batch(found: Mapping[str, Any]) -> list[str]:
    parts = []
    for drafter, figure in found["speedup_by_batch_and_k"].items():
        drafts = list(next(iter(figure["speedup"].values())))
        shares = ", ".join(f"{share:.2f}" for share in figure["acceptance_by_position"])
        rows = [
            (size.removeprefix("c"), *(_number(by_k[k]) for k in drafts))
            for size, by_k in figure["speedup"].items()
        ]
        parts += [
            f"`{drafter}`, {found['drafted_for'][drafter]}; accepted up to each position: {shares}. "
            f"{_where_it_stops(figure['speedup'])}",
            _table(("streams", *(f"k = {k}" for k in drafts)), rows),
        ]
    return parts


def _where_it_stops(speedup: Mapping[str, Mapping[str, float]]) -> str:
    """Say up to which batch size some k gains."""
    paying = [size.removeprefix("c") for size, by_k in speedup.items() if max(by_k.values()) >= _PAYS]
    if not paying:
        return "It pays at none of these batch sizes."
    if len(paying) == len(speedup):
        return "It pays at all of these batch sizes."
    return f"It pays at {', '.join(paying)} at once and no more."


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
