"""Times products with packed matrices, all of a model one after the other, and what the machine allows.

Options: ``{"matrices": [[columns, depth], ...]}``. Questions: ``{"limits": true}``, answered with GB/s and
GFLOP/s; ``{"format": name, "rows": R, "count": first so many matrices, "seconds": S}``, answered with ms.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch
from lines import serve

from conch_kernels.cpu.library import Team, library
from conch_kernels.cpu.native import Matrix
from conch_kernels.cpu.packing import FORMATS, packed_bytes, panels_of
from conch_kernels.cpu.quantising import FORMAT_OF_KIND

TRIES = 4
SMALL = 0x3FFF
"""As bf16 or fp16 a number below 2: random bytes under this mask are finite wherever a scale may be."""


class Model:
    """Random matrices of one format, one after the other in memory."""

    def __init__(self, name: str, shapes: list[tuple[int, int]]) -> None:
        layout = FORMAT_OF_KIND.get(name)
        number = layout.number if layout else FORMATS[torch.bfloat16]
        sizes = [
            panels_of(columns) * layout.panel_bytes(depth)
            if layout
            else packed_bytes(columns, depth, torch.bfloat16)
            for columns, depth in shapes
        ]
        self.room = torch.randint(0, 1 << 15, (sum(sizes) // 2,), dtype=torch.int16).bitwise_and_(SMALL)
        self.matrices = (Matrix * len(shapes))()
        at = self.room.data_ptr()
        for index, ((columns, depth), size) in enumerate(zip(shapes, sizes, strict=True)):
            self.matrices[index] = Matrix(panels=at, depth=depth, columns=columns, format=number)
            at += size


def best_of(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few runs."""
    took = []
    for _ in range(TRIES):
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return min(took)


def limits() -> dict[str, float]:
    """Measure reading memory, and a large bf16 product as torch does it."""
    memory = torch.ones(1 << 28, dtype=torch.uint8).view(torch.int64)
    left, right = torch.ones(2, 2048, 2048, dtype=torch.bfloat16)
    return {
        "gb_per_s": memory.nbytes / best_of(memory.sum) / 1e9,
        "gflop_per_s": 2 * 2048**3 / best_of(lambda: left @ right) / 1e9,
    }


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Make ready for one format at a time."""
    shapes = [(columns, depth) for columns, depth in options["matrices"]]
    team = Team(torch.get_num_threads())
    models: dict[str, Model] = {}

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if question.get("limits"):
            return limits()
        name, rows, count = question["format"], question["rows"], question["count"]
        if name not in models:
            models.clear()
            models[name] = Model(name, shapes)
        left = torch.randn(rows * max(depth for _, depth in shapes)).bfloat16()
        product = torch.empty(rows * max(columns for columns, _ in shapes[:count]))

        def run(rounds: int) -> None:
            library().conch_multiply_all(
                team.handle,
                models[name].matrices,
                count,
                ctypes.c_void_p(left.data_ptr()),
                rows,
                ctypes.c_void_p(product.data_ptr()),
                rounds,
            )

        rounds = max(1, int(question["seconds"] / TRIES / best_of(lambda: run(1))))
        return {"ms": best_of(lambda: run(rounds)) / rounds * 1e3}

    return {"threads": team.size}, answer


if __name__ == "__main__":
    serve(start)
