"""The two folders that tritonserver is pointed at, kept in the user's cache.

They are cached by content rather than made in a temporary place, so that a killed server leaves nothing
behind.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from conch.host.serving.errors import ServeError
from conch.host.serving.install import PYTHON_BACKEND_FILES, STUB_NAME, TritonInstall
from conch.host.serving.repository import ModelEntry, write_model

BACKEND_NAME = "conch"
ENTRY = """\
\"\"\"Where Triton enters: it imports this file as `model` and looks for `TritonPythonModel`.\"\"\"

from conch.host.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
"""


def cache_root() -> Path:
    """Return conch's cache folder; it need not exist."""
    if chosen := os.environ.get("CONCH_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "conch"


def backend_directory(install: TritonInstall) -> Path:
    """Return a folder for ``--backend-directory``: Triton's Python backend with the right stub, and conch.

    The entry is written rather than linked, so that an editable install and a wheel take the same path; the
    package itself is imported from where it is installed.
    """
    sources = [install.stub, *(install.python_backend / name for name in PYTHON_BACKEND_FILES)]
    stamps = [f"{path.resolve()} {path.stat().st_mtime_ns} {path.stat().st_size}" for path in sources]

    def fill(folder: Path) -> None:
        python = folder / "python"
        python.mkdir()
        for source in sources:  # copied, not linked: Triton refuses a library that leads out of the directory
            shutil.copyfile(source, python / source.name)
        (python / STUB_NAME).chmod(0o755)
        conch = folder / BACKEND_NAME
        conch.mkdir()
        (conch / "model.py").write_text(ENTRY)

    return _cached("backends", [*stamps, ENTRY], fill)


def model_repository(entry: ModelEntry) -> Path:
    """Return a model repository that holds exactly one model."""
    return _cached("repositories", [repr(entry)], lambda folder: write_model(folder, entry))


def _cached(kind: str, contents: list[str], fill: Callable[[Path], object]) -> Path:
    """Return the cached folder for these contents, filling it first where it is new; others may race us."""
    key = hashlib.sha256("\n".join(contents).encode()).hexdigest()[:16]
    target = cache_root() / kind / key
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=target.parent))
    except OSError as error:
        raise ServeError(
            f"cannot write to {target.parent} ({error.strerror}); set CONCH_CACHE to a folder"
        ) from error
    try:
        fill(scratch)
        scratch.chmod(0o755)
        scratch.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
