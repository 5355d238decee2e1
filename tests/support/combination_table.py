"""README's section "What combines", made from the list that `tests/engine/test_combinations.py` runs.

``python -m support.combination_table`` in the folder `tests` (or ``make fix``) writes it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from support.combinations import Product, pairwise
from support.scenarios import SCENARIOS

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- combinations: written by `make fix` -->", "<!-- end of combinations -->"
WIDTH = 120


def section() -> str:
    """Return what stands between the marks."""
    product = Product.built_in()
    introduction = textwrap.fill(_introduction(product), WIDTH, break_on_hyphens=False)
    return "\n".join([introduction, "", *_table(product)])


def in_readme(text: str) -> str:
    """Return what a README has between the marks."""
    return text.partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0]


def _introduction(product: Product) -> str:
    cells = product.cells()
    shown = "; ".join(scenario.shows for scenario in SCENARIOS.values())
    return (
        f"[One test](tests/engine/test_combinations.py) puts engines through {shown}. "
        "Each answer is that of transformers in fp32 or, where it is sampled or penalised, of the request "
        "alone (what is drawn beside a draft model is counted only: its law has tests of its own). "
        f"The table shows the ways to preempt and the drafters of the {len(pairwise(cells))} engines that "
        f"`make test` runs: every two choices meet in one. `pytest -m slow` runs all {len(cells)}. "
        f"KV manager: {_names(product.kv_managers)}; kernel: `cpu`."
    )


def _table(product: Product) -> list[str]:
    cells = pairwise(product.cells())
    lines = [_line(["scheduler \\ prefix cache", *map(str, product.caches)])]
    lines.append("|---" * (1 + len(product.caches)) + "|")
    for scheduler in product.schedulers:
        row = [
            "; ".join(
                f"{cell.preemption}, `{cell.drafter}`"
                for cell in cells
                if (cell.scheduler, cell.cache) == (scheduler, cache)
            )
            for cache in product.caches
        ]
        lines.append(_line([f"`{scheduler}`", *row]))
    return lines


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main() -> None:
    """Write the section."""
    text = README.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    written = pattern.sub(lambda _: f"{BEGIN}\n{section()}\n{END}", text)
    if written != text:
        README.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
