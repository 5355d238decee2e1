"""How the process of a rank ends, where it never becomes one."""

from __future__ import annotations

import socket

import pytest

from conch.engine import rank
from conch.engine.mesh.joining import Application, JoinError, NoEngineError
from conch.engine.mesh.secret import TOKEN_VARIABLE


@pytest.fixture
def status(monkeypatch):
    """Run the process here, with some options; returns how it would end."""

    def end_process(status):
        raise SystemExit(status)

    def run(*options):
        monkeypatch.setattr("sys.argv", ["rank", *options])
        with pytest.raises(SystemExit) as ended:
            rank.main()
        return ended.value.code

    monkeypatch.setattr(rank, "end_process", end_process)
    monkeypatch.setattr("conch.engine.rank.die_with_parent", lambda: None)
    monkeypatch.setattr(rank.signal, "signal", lambda number, handler: None)
    return run


@pytest.mark.parametrize(
    ("error", "ending"),
    [(JoinError("it knows another secret"), rank.REFUSED), (NoEngineError("no engine"), rank.FAILED)],
)
def test_only_what_may_change_is_worth_another_try(status, monkeypatch, capsys, error, ending):
    def refuse(application, secret):
        raise error

    monkeypatch.setenv(TOKEN_VARIABLE, "a secret that is long enough")
    monkeypatch.setattr(Application, "join", refuse)
    assert status("--host=a", "--port=1") == ending
    assert f"conch: error: {error}" in capsys.readouterr().err


def test_without_a_secret_it_does_not_try(status, monkeypatch, capsys):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert status("--host=a", "--port=1") == rank.REFUSED
    assert "ranks of other hosts need a secret" in capsys.readouterr().err


def test_an_engine_that_is_gone_before_it_has_spoken_is_a_failure(status):
    ours, theirs = socket.socketpair()
    ours.close()
    assert status(f"--fd={theirs.detach()}") == rank.FAILED
