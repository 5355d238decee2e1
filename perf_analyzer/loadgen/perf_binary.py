"""Finds Triton's perf_analyzer, and the two libraries that it wants and few machines have.

The wheel of tritonclient 2.51 carries the binary. It is linked to libb64.so.0d and libcudart.so.12 even where
there is no GPU; nvidia-pytriton bundles both under other names, so that links to them, in a cache folder of
ours, are all that is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loadgen.machine import ROOT

# perf_analyzer exports a value for each output that the model declares, also for those that a response lacks,
# and what it writes there is stale memory. Against a model with such outputs 3 of 40 exports came out empty,
# presumably where the stale bytes were a NaN, which JSON cannot hold. With one heap for all threads it was 0
# of 40: too few to prove that this helps, so `perf_runs.run` repeats a run whose export is empty.
ONE_HEAP = "glibc.malloc.arena_max=1"
CACHE = ROOT / ".cache" / "perf_analyzer"
HOW_TO_INSTALL = {
    "libb64.so.0d": "apt-get install libb64-0d (or pip install nvidia-pytriton==0.7.0, which bundles it)",
    "libcudart.so.12": "pip install nvidia-cuda-runtime-cu12 (or nvidia-pytriton==0.7.0, which bundles it)",
}


class PerfAnalyzerMissing(RuntimeError):
    """perf_analyzer cannot run here; the message says what to install."""


@dataclass(frozen=True)
class PerfAnalyzer:
    """A binary that runs.

    Attributes
    ----------
    environment
        What to run it in: its libraries are on ``LD_LIBRARY_PATH``, its folder on ``PATH``.
    """

    path: Path
    environment: Mapping[str, str]

    def version(self) -> str:
        """Return what ``--version`` says."""
        command = [str(self.path), "--version"]
        done = subprocess.run(command, env=dict(self.environment), capture_output=True, text=True, check=True)
        return (done.stdout + done.stderr).strip()


def find_or_install() -> PerfAnalyzer:
    """Return a perf_analyzer that runs, installing the binary into `CACHE` where there is none.

    Raises
    ------
    PerfAnalyzerMissing
        A library is missing that nothing installed here carries.
    """
    path = _find() or _install()
    libraries = link_libraries(_missing_libraries(path, _environment(path)))
    return PerfAnalyzer(path, _environment(path, libraries))


def _find() -> Path | None:
    beside = Path(sys.executable).parent / "perf_analyzer"
    cached = CACHE / "bin" / "perf_analyzer"
    found = shutil.which("perf_analyzer")
    for candidate in (beside, cached, Path(found) if found else None):
        if candidate is not None and candidate.is_file():
            return candidate
    return None


def _install() -> Path:
    new_enough = tuple(map(int, os.confstr("CS_GNU_LIBC_VERSION").split()[1].split("."))) >= (2, 38)  # type: ignore[union-attr]
    package = "perf-analyzer" if new_enough else "tritonclient==2.51.0"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(CACHE),
        package,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    path = CACHE / "bin" / "perf_analyzer"
    if done.returncode or not path.is_file():
        raise PerfAnalyzerMissing(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
    return path


def _environment(path: Path, libraries: Path | None = None) -> dict[str, str]:
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([str(path.parent), environment.get("PATH", os.defpath)])
    environment["GLIBC_TUNABLES"] = ONE_HEAP
    if libraries is not None:
        known = [environment["LD_LIBRARY_PATH"]] if environment.get("LD_LIBRARY_PATH") else []
        environment["LD_LIBRARY_PATH"] = os.pathsep.join([str(libraries), *known])
    return environment


def _missing_libraries(path: Path, environment: Mapping[str, str]) -> list[str]:
    done = subprocess.run(
        ["ldd", str(path)], env=dict(environment), capture_output=True, text=True, check=False
    )
    return missing_in(done.stdout)


def missing_in(ldd_output: str) -> list[str]:
    """Return the names of the libraries that `ldd` did not find."""
    return re.findall(r"^\s*(\S+) => not found", ldd_output, re.MULTILINE)


def link_libraries(missing: list[str], site_packages: Path | None = None, folder: Path | None = None) -> Path:
    """Link each missing library to a copy that a Python package bundles; return the folder of links.

    Raises
    ------
    PerfAnalyzerMissing
        No package here bundles one of them.
    """
    site_packages = site_packages or Path(sysconfig.get_paths()["purelib"])
    folder = folder or CACHE / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    unknown = []
    for name in missing:
        bundled = _bundled(name, site_packages)
        if bundled is None:
            unknown.append(f"{name}: {HOW_TO_INSTALL.get(name, 'no known package')}")
            continue
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(bundled)
    if unknown:
        raise PerfAnalyzerMissing("perf_analyzer needs libraries that are not here:\n" + "\n".join(unknown))
    return folder


def _bundled(name: str, site_packages: Path) -> Path | None:
    """Return a bundled copy: auditwheel puts a hash before the first ``.so`` of the name."""
    stem, _, version = name.partition(".so")
    places = (("nvidia_pytriton.libs", f"{stem}-*.so{version}*"), ("nvidia/*/lib", f"{name}*"))
    for place, pattern in places:
        for found in sorted(site_packages.glob(f"{place}/{pattern}")):
            return found
    return None
