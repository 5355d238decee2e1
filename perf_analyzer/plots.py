"""Draws a result of `bench_serving.py`: latency against concurrency, and gaps while a long prompt arrives.

``python perf_analyzer/plots.py [RESULT.json]`` writes PNG files beside the result, by default the newest one.
Needs matplotlib: ``pip install 'conch[bench]'``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadgen import report
from matplotlib import pyplot

Result = Mapping[str, Any]


def latency_against_concurrency(result: Result, path: Path) -> None:
    """Draw TTFT, ITL and tokens a second for each concurrency."""
    levels = result["experiments"]["concurrency_sweep"]["concurrency"]
    concurrency = [int(level) for level in levels]
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for axis, key, title in zip(axes, ("ttft_ms", "itl_ms"), ("TTFT, ms", "ITL, ms"), strict=False):
        for rank in ("p50", "p99"):
            values = [summary[key][rank] if summary[key] else None for summary in levels.values()]
            axis.plot(concurrency, values, marker="o", label=rank)
        axis.set_title(title)
        axis.legend()
    axes[2].plot(concurrency, [summary["tokens_per_s"] for summary in levels.values()], marker="o")
    axes[2].set_title("output tokens/s")
    for axis in axes:
        axis.set_xlabel("concurrent requests")
        axis.set_xscale("log", base=2)
        axis.set_xticks(concurrency, [str(value) for value in concurrency])
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.suptitle(_caption(result))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def gaps_while_a_long_prompt_arrives(result: Result, path: Path) -> None:
    """Draw the gaps between tokens of one stream over time, a curve for each mode."""
    figure, axis = pyplot.subplots(figsize=(9, 4), layout="constrained")
    for name, mode in result["experiments"]["chunked_prefill"]["modes"].items():
        times, gaps = zip(*mode["timeline"], strict=True)
        axis.plot(times, gaps, linewidth=0.9, marker=".", markersize=3, label=name.replace("_", ", budget "))
    axis.axvline(0, color="grey", linestyle=":")
    axis.set_yscale("log")
    axis.set_xlabel("seconds since the first long prompt")
    axis.set_ylabel("gap between tokens, ms")
    axis.legend()
    axis.grid(alpha=0.3)
    axis.set_title(_caption(result))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


PLOTS = {
    "concurrency_sweep": ("latency", latency_against_concurrency),
    "chunked_prefill": ("gaps", gaps_while_a_long_prompt_arrives),
}


def draw(result: Result, beside: Path) -> list[Path]:
    """Draw every plot whose experiment is in the result; return the files written."""
    written = []
    for experiment, (suffix, plot) in PLOTS.items():
        if experiment in result["experiments"]:
            path = beside.with_name(f"{beside.stem}-{suffix}.png")
            plot(result, path)
            written.append(path)
    return written


def _caption(result: Result) -> str:
    hardware = result["hardware"]
    machine = f"{hardware['cpu']}, {hardware['cores']} cores"
    return f"{result['model']}, {result['dtype']}, {machine}, {result['date'][:10]}"


def main() -> int:
    """Draw and say where."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "result", type=Path, nargs="?", help="a JSON of results/serving; the newest by default"
    )
    pyplot.switch_backend("Agg")
    chosen = parser.parse_args().result
    known = sorted((report.RESULTS / "serving").glob("*.json"), key=lambda path: path.stat().st_mtime)
    if chosen is None and not known:
        print("no result yet: run bench_serving.py first", file=sys.stderr)
        return 1
    path = chosen or known[-1]
    for written in draw(json.loads(path.read_text()), path):
        print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
