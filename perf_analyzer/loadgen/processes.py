"""What a process and its children use: memory, CPU, shared memory. Linux."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil


def family(pid: int) -> list[psutil.Process]:
    """Return the process and all its living descendants."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def role(process: psutil.Process) -> str:
    """Name a process of a served model for people: server, stub, engine or supervisor."""
    line = " ".join(process.cmdline())
    for mark, name in (
        ("triton_python_backend_stub", "stub"),
        ("tritonserver", "server"),
        ("conch.engine", "engine"),
    ):
        if mark in line:
            return name
    return "supervisor"


def memory_mb(pid: int) -> dict[str, float]:
    """Return resident memory without shared pages, in MiB, summed by role.

    Shared pages are left out because they are counted once, by `shared_memory_mb`.
    """
    totals: dict[str, float] = {}
    for process in family(pid):
        try:
            memory = process.memory_info()
            name = role(process)
        except psutil.NoSuchProcess:
            continue
        totals[name] = totals.get(name, 0.0) + (memory.rss - memory.shared) / (1 << 20)
    return {name: round(total, 2) for name, total in sorted(totals.items())}


def pids_by_role(pid: int) -> dict[str, list[int]]:
    """Return the ids of the server, stub and engine processes: those that must not be replaced."""
    found: dict[str, list[int]] = {}
    for process in family(pid):
        try:
            name = role(process)
        except psutil.NoSuchProcess:
            continue
        if name in ("server", "stub", "engine"):
            found.setdefault(name, []).append(process.pid)
    return {name: sorted(pids) for name, pids in sorted(found.items())}


def shared_memory_mb(pid: int) -> float:
    """Return MiB under /dev/shm that the process or a descendant has mapped, unlinked files included.

    Other programs' files do not count, so that the figure means something on a busy machine.
    """
    regions: dict[str, int] = {}
    for process in family(pid):
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        except (OSError, psutil.NoSuchProcess):
            continue
        for inode, size in _shm_regions(lines):
            regions[inode] = max(size, regions.get(inode, 0))
    return round(sum(regions.values()) / (1 << 20), 2)


def _shm_regions(lines: Iterable[str]) -> Iterable[tuple[str, int]]:
    for line in lines:
        if "/dev/shm/" in line:
            span, _, _, _, inode, _ = line.split(maxsplit=5)
            start, end = span.split("-")
            yield inode, int(end, 16) - int(start, 16)


def cpu_cores(pid: int, seconds: float) -> float:
    """Return how many cores the process and its descendants kept busy, on average, over `seconds`."""
    before = _cpu_s(pid)
    began = time.perf_counter()
    time.sleep(seconds)
    return (_cpu_s(pid) - before) / (time.perf_counter() - began)


def _cpu_s(pid: int) -> float:
    total = 0.0
    for process in family(pid):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def end_family(pid: int, grace_s: float) -> None:
    """Ask a process to end, and end it and all that it started once `grace_s` is over."""
    try:
        members = family(pid)
    except psutil.NoSuchProcess:
        return
    members[0].terminate()
    _, alive = psutil.wait_procs(members, timeout=grace_s)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=5)


def unwind_on_sigterm() -> None:
    """Let SIGTERM end a benchmark the way an exception does, so that what it has started ends with it."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
