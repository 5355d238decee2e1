"""On what, when and with which code a figure was measured: a number without these is none."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("conch", "torch", "transformers", "tokenizers", "nvidia-pytriton", "tritonclient", "numpy")
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def cpu_model() -> str:
    """Return the processor's name as the system states it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def cpu_slug() -> str:
    """Return the processor's name for a file name."""
    return re.sub(r"[^a-z0-9]+", "-", cpu_model().lower()).strip("-")


def _cpu_flags() -> list[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    present = set(text.split())
    return [flag for flag in _FLAGS if flag in present]


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe() -> dict[str, Any]:
    """Return date, hardware, versions, commit and command of this run."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "git_commit": _git("rev-parse", "HEAD") or None,
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "hardware": {
            "cpu": cpu_model(),
            "cpu_flags": _cpu_flags(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
            "load_average_1m": round(os.getloadavg()[0], 2),
        },
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
    }
