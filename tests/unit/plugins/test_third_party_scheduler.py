"""The scheduler of the plugin package in `tests/plugin_packages`, as its author would test it."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

from conch.testing import SchedulerContract, Simulation, make_context
from conch_plugins.schedulers.fcfs import FcfsScheduler

SOURCE = Path(__file__).parents[2] / "plugin_packages" / "shortest_first" / "conch_shortest_first.py"
MODULE = runpy.run_path(str(SOURCE))
ShortestFirst = MODULE["conch_schedulers"]()["shortest_first"]


class TestShortestFirst(SchedulerContract):
    def build(self, context):
        return ShortestFirst(context)


def order_of_service(scheduler):
    context = make_context(max_num_seqs=1)
    simulation = Simulation(scheduler(context), context)
    for length in (30, 9, 20, 3):
        simulation.add(range(length), max_tokens=3)
    simulation.run()
    return [request.num_prompt for request in simulation.ended]


def test_the_order_of_service_is_its_own():
    assert order_of_service(ShortestFirst) == [3, 9, 20, 30]
    assert order_of_service(FcfsScheduler) == [30, 9, 20, 3]


def test_it_needs_nothing_but_the_api_and_little_of_it():
    tree = ast.parse(SOURCE.read_text())
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported == ["conch.api"]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    assert len([line for line in SOURCE.read_text().splitlines() if line.strip()]) <= 20
