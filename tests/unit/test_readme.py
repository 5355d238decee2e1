"""What the README claims is what the tree holds."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from pathlib import Path

import pytest

import conch.cli.main as command
from conch.api import hookspecs
from conch.api.config import parse_config
from conch.engine.catalogue import HOOKS, Catalogue

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PLUGIN = ROOT / "tests" / "plugin_packages" / "shortest_first"


def blocks(language: str) -> list[str]:
    """Return the code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def table_rows() -> list[list[str]]:
    """Return the cells of all table rows."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in README.splitlines()
        if line.startswith("|")
    ]


def test_the_plugin_shown_is_the_one_that_is_tested() -> None:
    (shown,) = blocks("python")
    assert shown == (PLUGIN / "conch_shortest_first.py").read_text(encoding="utf-8")
    (entry_points,) = blocks("toml")
    assert entry_points in (PLUGIN / "pyproject.toml").read_text(encoding="utf-8")


def test_the_plugin_has_the_promised_length() -> None:
    (lines,) = re.findall(r"^## A plugin in (\d+) lines$", README, re.MULTILINE)
    code = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(code) <= int(lines)


@pytest.mark.parametrize("seam", HOOKS)
def test_each_hook_is_documented_with_its_signature_and_what_is_built_in(seam: str) -> None:
    hook = HOOKS[seam]
    parameters = ", ".join(inspect.signature(getattr(hookspecs, hook)).parameters)
    (row,) = [row for row in table_rows() if row[0] == f"`{hook}({parameters})`"]
    offered = {record["name"] for record in Catalogue.load().describe() if record["seam"] == seam}
    assert set(re.findall(r"`(\w+)`", row[2])) == offered
    keys = {key: key for key in parse_config({"model": "m"}).__struct_fields__}
    keys["drafter"] = "speculative_config.method"
    assert (row[3] == f"`{keys[seam]}`") if seam in keys else row[3].startswith("no key")


def test_no_hook_is_documented_that_is_not_there() -> None:
    assert set(re.findall(r"`(conch_\w+)\(", README)) == set(HOOKS.values())


def test_example_configurations_are_valid() -> None:
    shown = blocks("json")
    assert shown
    for text in shown:
        parse_config(json.loads(text))


def test_the_commands_exist() -> None:
    parser = command.build_parser()
    (subcommands,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    named = set(re.findall(r"`conch ([\w-]+)", README))
    assert named and named <= subcommands.choices.keys()


def test_the_make_targets_exist() -> None:
    targets = re.findall(r"^([\w%-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = set(re.findall(r"\bmake ([\w-]+)", README))
    assert named <= {
        *targets,
        *(name for name in named if name.startswith("bench-") and "bench-%" in targets),
    }


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert not [link for link in links if not (ROOT / link.partition("#")[0]).exists()]
