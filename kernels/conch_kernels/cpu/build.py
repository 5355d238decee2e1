"""The C++ of this folder, compiled once for the machine it runs on and kept.

A build is found by what made it: sources, flags, compiler and the abilities of the CPU. It appears whole or
not at all, so a process that dies while it compiles leaves nothing behind that another would wait for.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from conch_kernels.cache import cached_folder

_NAME = "conch_cpu"
_HERE = Path(__file__).parent
_MAX_ERROR = 2000
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    "-Wno-psabi",
    "-pthread",
)


class BuildError(Exception):
    """The extension cannot be built here; the message says why."""


def build(extra_flags: tuple[str, ...] = ()) -> Path:
    """Return the shared library, compiling it where that has not been done yet (10 to 30 s).

    Parameters
    ----------
    extra_flags
        For the compiler, after our own; tests build for lesser CPUs with them.

    Raises
    ------
    BuildError
        There is no C++20 compiler, it fails, or the cache cannot be written.
    """
    try:
        return _cached(extra_flags)
    except (OSError, RuntimeError) as error:  # no room, no permission, no home folder
        raise BuildError(f"the compiled kernels cannot be kept: {error}") from error


def _cached(extra_flags: tuple[str, ...]) -> Path:
    compiler = _compiler()
    flags = (*_FLAGS, *extra_flags)
    sources = sorted(_HERE.glob("*.cpp"))
    digest = hashlib.blake2b(digest_size=12)
    for path in (*sources, *sorted(_HERE.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for fact in (*flags, _version_of(compiler), _abilities_of_cpu()):
        digest.update(fact.encode() + b"\0")
    folder = cached_folder(
        f"{_NAME}-{digest.hexdigest()}", lambda scratch: _compile(scratch, sources, (*compiler, *flags))
    )
    return folder / f"{_NAME}.so"


def _compile(folder: Path, sources: list[Path], command: Sequence[str]) -> None:
    """Compile the files side by side, then link them."""
    objects = [folder / f"{path.stem}.o" for path in sources]
    _run(
        *(
            [*command, "-c", str(path), "-o", str(target)]
            for path, target in zip(sources, objects, strict=True)
        )
    )
    _run([*command, "-shared", *map(str, objects), "-o", str(folder / f"{_NAME}.so")])
    for path in objects:
        path.unlink()


def _run(*commands: Sequence[str]) -> None:
    """Run commands at once; raises once all have ended."""
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    errors = [(process.communicate()[1], process.returncode) for process in running]
    for text, code in errors:
        if code:
            raise BuildError(f"the C++ kernels do not compile: {text.strip()[:_MAX_ERROR]}")


def _compiler() -> tuple[str, ...]:
    name, *options = shlex.split(os.environ.get("CXX", "c++"))
    path = shutil.which(name)
    if path is None:
        raise BuildError(f"no C++ compiler: {name!r} is not on PATH (Debian: apt-get install g++)")
    return path, *options


def _version_of(compiler: Sequence[str]) -> str:
    done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout


def _abilities_of_cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
