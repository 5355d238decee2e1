"""Where compiled kernels cannot be made or kept, the reason comes out as a BuildError."""

from __future__ import annotations

import pytest

from conch_kernels.cpu.build import BuildError, build
from conch_kernels.cpu.library import library


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CONCH_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(BuildError, match="cannot be kept"):
        build()


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CONCH_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(BuildError, match="'no-such-compiler' is not on PATH"):
        build()
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("CONCH_CACHE", str(tmp_path))
    with pytest.raises(BuildError, match="do not compile"):
        build(("-no-such-flag",))
    assert not list(tmp_path.iterdir()), "nothing half made is left behind"


def test_a_library_that_cannot_be_loaded(tmp_path):
    path = tmp_path / "broken.so"
    path.write_text("not a library")
    with pytest.raises(BuildError, match="cannot be loaded"):
        library(path)
