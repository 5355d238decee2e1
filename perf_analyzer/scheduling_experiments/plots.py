"""Draws targets met against load. Needs matplotlib: ``pip install 'conch[bench]'``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

COLOURS = {"slo": "tab:blue", "fcfs": "tab:orange"}
ENGINES = (("simulated", "-", "o"), ("real", "--", "s"))


def attainment_against_load(experiment: Mapping[str, Any], path: Path) -> None:
    """Draw shares of requests in time by load: both targets, and each by itself."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for axis, (key, title) in zip(
        axes, (("both", "both in time"), ("ttft", "first token"), ("tpot", "further tokens")), strict=True
    ):
        for engine, line, marker in ENGINES:
            for scheduler, loads in experiment["details"][engine].items():
                axis.plot(
                    [float(load) for load in loads],
                    [shares[key] for shares in loads.values()],
                    line,
                    marker=marker,
                    color=COLOURS.get(scheduler),
                    label=f"{scheduler}, {engine}",
                )
        axis.set_title(title)
        axis.set_xlabel("load (1: what the machine can serve)")
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of requests")
    axes[0].legend()
    figure.savefig(path, dpi=130)
