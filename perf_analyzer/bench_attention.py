"""`make bench-attention`: the attention of one layer, the `cpu` kernel beside `torch` and beside the limits.

The limits are measured in the same run: bytes of KV over the rate of reading memory, or operations over the
rate of a large bf16 product, whichever takes longer. Heads are those of SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from loadgen import machine, processes, report
from loadgen.worker import Worker
from rich.table import Table

HEADS = (9, 3, 64)
BLOCK_SIZE = 16
CASES = {
    "prefill_2048": ([(2048, 2048)], 4),
    "chunk_512_of_4000": ([(4000, 512)], 4),
    "decode_32x336": ([(336, 1)] * 32, 30),
    "decode_1x256": ([(256, 1)], 30),
    "decode_1x4000": ([(4000, 1)], 30),
    "mixed_512_and_31x336": ([(512, 512)] + [(336, 1)] * 31, 8),
}
"""Rows (length, tokens to compute), and how many layers' pools to go round."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=5, help="times that each kernel goes through all layers"
    )
    parser.add_argument("--output", type=Path, help="folder for the result")
    return parser.parse_args()


def floor_us(rows: list[tuple[int, int]], limits: dict[str, float]) -> float:
    """Return the microseconds that the machine needs at least."""
    heads, kv_heads, size = HEADS
    read = sum(length for length, _ in rows) * kv_heads * size * 2 * 2
    seen = sum(count * (length - count) + count * (count + 1) / 2 for length, count in rows)
    operations = 4 * heads * size * seen
    return max(read / limits["gb_per_s"], operations / limits["gflop_per_s"]) * 1e-3


def table_of(took: dict[str, dict[str, float]], floors: dict[str, float]) -> Table:
    """Return a table with a row for each case."""
    table = Table(title="Attention of one layer, us")
    for heading in ("case", "cpu", "torch", "floor", "torch / cpu", "floor / cpu"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for name, one in took.items():
        table.add_row(
            name,
            *(f"{value:.0f}" for value in (one["cpu"], one["torch"], floors[name])),
            f"{one['torch'] / one['cpu']:.1f}",
            f"{floors[name] / one['cpu']:.2f}",
        )
    return table


def main() -> int:
    """Run, write, print."""
    processes.unwind_on_sigterm()
    arguments = parse_arguments()
    output, _ = report.consoles()
    environment = machine.describe()
    with Worker("attention_worker.py", {"heads": HEADS, "block_size": BLOCK_SIZE}) as worker:
        limits = worker.ask({"limits": True})
        took = {
            name: worker.ask({"rows": rows, "layers": layers, "rounds": arguments.rounds})
            for name, (rows, layers) in CASES.items()
        }
        threads = worker.ready["threads"]
    floors = {name: floor_us(rows, limits) for name, (rows, _) in CASES.items()}
    headline = {f"{name}_us": round(one["cpu"], 1) for name, one in took.items()}
    path = report.write(
        "attention",
        {
            "headline": headline,
            "limits": limits,
            "us": took,
            "floor_us": floors,
            "threads": threads,
            **environment,
        },
        arguments.output,
    )
    output.print(table_of(took, floors))
    output.print({name: round(value, 1) for name, value in limits.items()})
    output.print(f"written to {path}", markup=False, soft_wrap=True)
    report.print_last_line(output, headline)
    return 0


if __name__ == "__main__":
    sys.exit(main())
