"""F21, F25, F26, F29 to F32 and F44 for every scheduler x prefix cache x preemption x drafter x KV manager.

By default enough combinations that every two choices meet in one; all of them as ``slow``.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from conch.engine.local import LocalEngine
from support.combination_table import README, in_readme, section
from support.combinations import Cell, Product, model, pairwise
from support.oracle import Oracle
from support.scenarios import SCENARIOS
from support.stand import Job, Stand, Truth, greedy

CELLS = Product.installed().cells()
QUICK = pairwise(CELLS)


@pytest.fixture(scope="module")
def truth() -> Iterator[Truth]:
    plain = msgspec.structs.replace(
        CELLS[0].config(),  # without a cache and without a drafter
        scheduler="fcfs",
        num_gpu_blocks_override=100,
        max_num_batched_tokens=512,
    )
    assert (plain.prefix_cache, plain.drafter) == ("none", "none")
    with LocalEngine(plain) as engine:
        yield Truth(engine, Oracle(model()))


def marks(cell: Cell) -> tuple[pytest.MarkDecorator, ...]:
    return () if cell in QUICK else (pytest.mark.slow,)


@pytest.fixture(
    scope="module", params=[pytest.param(cell, marks=marks(cell), id=str(cell)) for cell in CELLS]
)
def served(request) -> Iterator[tuple[Cell, LocalEngine]]:
    with LocalEngine(request.param.config()) as engine:
        yield request.param, engine


@pytest.mark.parametrize(
    "name", SCENARIOS, ids=[f"{name}: {scenario.faults}" for name, scenario in SCENARIOS.items()]
)
def test_the_fault_is_absent(served, name, truth):
    stand = Stand(*served, truth)
    SCENARIOS[name].run(stand)
    stand.assert_drained()


def test_a_drafter_drafts(served, truth):
    cell, engine = served
    stand = Stand(cell, engine, truth)
    jobs = [Job((7, 50, 60, 9) * 4, greedy(20))]
    stand.check(jobs, stand.serve(jobs))
    assert (stand.rise("drafts") > 0) is (cell.drafter != "none")


def test_few_combinations_hold_every_pair():
    assert set().union(*(cell.pairs for cell in QUICK)) == set().union(*(cell.pairs for cell in CELLS))
    assert len(QUICK) < len(CELLS) / 5


def test_the_readme_says_what_is_tested():
    assert in_readme(README.read_text(encoding="utf-8")) == section(), "`make fix` writes it"
