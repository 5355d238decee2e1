"""``conch rank``: what it reads from its options and from a launcher's variables."""

from __future__ import annotations

import subprocess

import pytest

from conch.api.errors import ConfigError
from conch.cli import rank
from conch.cli.main import build_parser, main


def told(*options: str, **variables: str) -> dict[str, str]:
    """Return what the rank's process is told."""
    parsed = build_parser().parse_args(["rank", *options])
    return dict(each.split("=", 1) for each in rank.rank_arguments(parsed, variables))


def test_an_option_says_where_the_engine_is_and_which_rank_this_is() -> None:
    options = told(
        "--rdzv=10.0.0.1:29501", "--rank=3", "--wait=5", "--token-file=t", RANK="0", WORLD_SIZE="2"
    )
    assert options["--host"] == "10.0.0.1" and options["--port"] == "29501"
    assert options["--rank"] == "3" and "--world-size" not in options
    assert options["--wait"] == "5.0" and options["--token-file"] == "t"
    assert told("--rdzv=[fd00::1]:29501")["--host"] == "fd00::1"


def test_a_launcher_says_which_rank_this_is_and_how_many_share_the_host(monkeypatch) -> None:
    monkeypatch.setattr(rank, "usable_cores", lambda: 8)
    options = told("--rdzv=a:1", RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    assert options["--rank"] == "1" and options["--world-size"] == "2" and options["--threads"] == "4"
    assert told("--rdzv=a:1")["--threads"] == "8"


def test_the_engine_is_the_master_unless_that_is_torchruns_own() -> None:
    master = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}
    assert told(**master)["--host"] == "10.0.0.1"
    with pytest.raises(ConfigError, match="--rdzv HOST:PORT is missing"):
        told(**master, TORCHELASTIC_RUN_ID="none")
    with pytest.raises(ConfigError, match="--rdzv HOST:PORT is missing"):
        told()


@pytest.mark.parametrize(
    ("options", "variables", "reason"),
    [
        (["--rdzv=10.0.0.1"], {}, "expected HOST:PORT, got '10.0.0.1'"),
        (["--rdzv=:29501"], {}, "expected HOST:PORT"),
        ([], {"MASTER_ADDR": "a"}, "expected HOST:PORT"),
        (["--rdzv=a:1"], {"RANK": "first"}, "RANK must be a number, not 'first'"),
        (["--rdzv=a:1", "--model=/nowhere/at/all"], {}, "there is no model at /nowhere/at/all"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, variables, reason) -> None:
    with pytest.raises(ConfigError, match=reason):
        told(*options, **variables)


def test_it_starts_the_rank_again_only_forever_and_where_that_is_of_use(monkeypatch) -> None:
    statuses, pauses = [1, 0, 1, 1, -9, 2], []

    def run(command, **settings):
        assert "conch.engine.rank" in command
        return subprocess.CompletedProcess(command, statuses.pop(0))

    monkeypatch.setattr(rank.subprocess, "run", run)
    monkeypatch.setattr(rank.time, "sleep", pauses.append)
    assert main(["rank", "--rdzv=a:1"]) == 1
    assert main(["rank", "--rdzv=a:1", "--forever"]) == 2
    assert pauses == [0.5, 1.0, 2.0, 4.0]
    statuses = [0, -9]
    assert main(["rank", "--rdzv=a:1"]) == 0
    assert main(["rank", "--rdzv=a:1"]) == 1
