"""The C++ of this folder, compiled once for the machine it runs on and kept.

A build is found by what made it: sources, flags, compiler and the abilities of the CPU. It appears whole or
not at all, so a process that dies while it compiles leaves nothing behind that another would wait for.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

from conch_kernels.cache import cached_folder

_NAME = "conch_cpu"
_HERE = Path(__file__).parent
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-pthread",
)


class BuildError(Exception):
    """The extension cannot be built here; the message says why."""


def build(extra_flags: tuple[str, ...] = ()) -> Path:
    """Return the shared library, compiling it where that has not been done yet (some 20 s).

    Parameters
    ----------
    extra_flags
        For the compiler, after our own; tests build for lesser CPUs with them.

    Raises
    ------
    BuildError
        There is no C++20 compiler, or it fails.
    """
    compiler = _compiler()
    flags = (*_FLAGS, *extra_flags)
    sources = sorted(_HERE.glob("*.cpp"))
    digest = hashlib.blake2b(digest_size=12)
    for path in (*sources, *sorted(_HERE.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for fact in (*flags, _version_of(compiler), _abilities_of_cpu()):
        digest.update(fact.encode() + b"\0")
    folder = cached_folder(f"{_NAME}-{digest.hexdigest()}", lambda scratch: _compile(scratch, sources, flags))
    return folder / f"{_NAME}.so"


def _compile(folder: Path, sources: list[Path], flags: tuple[str, ...]) -> None:
    from torch.utils import cpp_extension

    try:
        cpp_extension.load(
            name=_NAME,
            sources=[str(path) for path in sources],
            extra_cflags=list(flags),
            extra_ldflags=["-pthread"],
            build_directory=str(folder),
            is_python_module=False,
            with_cuda=False,
            keep_intermediates=False,
        )
    except (RuntimeError, OSError, ImportError) as error:
        raise BuildError(f"the C++ kernels do not compile: {error}") from error
    for path in folder.iterdir():
        if path.suffix != ".so":
            path.unlink()


def _compiler() -> str:
    name = os.environ.get("CXX", "c++")  # as torch's extension builder has it
    path = shutil.which(name)
    if path is None:
        raise BuildError(f"no C++ compiler: {name!r} is not on PATH (Debian: apt-get install g++)")
    return path


def _version_of(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout


def _abilities_of_cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
