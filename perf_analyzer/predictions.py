"""Prints the README's table of predictions, which `conch topology` makes. Nothing of it is measured.

``python perf_analyzer/predictions.py``; the models are configs only (`predicted_models/`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODELS = Path(__file__).with_name("predicted_models")
HARDWARE = "8xH200"
TENSOR, PIPELINE, EXPERT, DATA = (
    f"--{kind}-parallel-size" for kind in ("tensor", "pipeline", "expert", "data")
)
ROWS = (
    ("Llama-3-70B", "TP8", "llama-3-70b", (TENSOR, "8")),
    ("", "TP4 x PP2", "llama-3-70b", (TENSOR, "4", PIPELINE, "2")),
    ("", "DP2 x TP4", "llama-3-70b", (DATA, "2", TENSOR, "4")),
    ("Mixtral-8x22B", "TP8", "mixtral-8x22b", (TENSOR, "8")),
    ("", "TP4 x PP2", "mixtral-8x22b", (TENSOR, "4", PIPELINE, "2")),
    ("", "TP2 x EP4", "mixtral-8x22b", (TENSOR, "2", EXPERT, "4")),
    ("", "EP8", "mixtral-8x22b", (EXPERT, "8")),
)
HEADINGS = (
    "model, bf16",
    "topology",
    "weights a GPU, GB",
    "tokens of KV that fit",
    "kB a token that a GPU tells others",
    "prompt of 2,048, ms",
    "ms a token / tokens/s, 1 request",
    "32 requests",
    "256 requests",
)


def ask(model: str, sizes: tuple[str, ...]) -> dict[str, Any]:
    """Return what `conch topology` says."""
    command = [sys.executable, "-m", "conch.cli", "topology", f"--model={MODELS / model}", *sizes]
    answer = subprocess.run(
        [*command, f"--hardware={HARDWARE}", "--json"], check=True, capture_output=True, text=True
    )
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def cells(found: Mapping[str, Any]) -> list[str]:
    """Return a row's figures: of the rank that has most, or has most to say."""
    ranks, predicted = found["ranks"], found["predicted"]
    told = max(sum(rank["bytes_per_token"].values()) for rank in ranks)
    return [
        f"{max(rank['weight_bytes'] for rank in ranks) / 1e9:.0f}",
        f"{predicted['kv_tokens']:,}",
        f"{told / 1e3:,.0f}",
        f"{predicted['prompt_s'] * 1e3:.0f}",
        *(decode_cell(one) for one in predicted["decode"].values()),
    ]


def decode_cell(one: Mapping[str, Any]) -> str:
    """Return latency and rate, or that there is no room."""
    if not one["fits"]:
        return "does not fit"
    return f"{one['ms_per_token']:.1f} / {one['tokens_per_s']:,.0f}"


def main() -> int:
    """Print the table in Markdown."""
    print("".join(f"| {heading} " for heading in HEADINGS) + "|")
    print("|---" * len(HEADINGS) + "|")
    for name, topology, model, sizes in ROWS:
        row = [name, topology, *cells(ask(model, sizes))]
        print("".join(f"| {cell} " for cell in row) + "|", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
