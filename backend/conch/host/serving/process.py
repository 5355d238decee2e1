"""One run of tritonserver with all of its descendants and traces."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from conch.host.serving.command import ServerCommand

SHARED_MEMORY = Path("/dev/shm")
# Triton's Python backend makes one empty folder of this name in each server, whatever TMPDIR says.
_PYTHON_ENVIRONMENTS = "/tmp", "python_env_*"
_KILL_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36
_WILL_DONE = "done"
# Reads folders to remove from us, until we say that all is done. When we are killed it gets end-of-file
# instead, and clears up what we no longer can.
_LAST_WILL = """\
while read -r line; do
    [ "$line" = done ] && exit
    folder=$line
done
kill -9 "-$1"
sleep 0.2
rm -f -- "$2"*
[ -z "$folder" ] || rmdir -- "$folder"
"""


class ServerProcess:
    """A tritonserver in a process group of its own, which ends with us, whatever ends us.

    Parameters
    ----------
    command
        What to run.
    """

    def __init__(self, command: ServerCommand) -> None:
        _become_subreaper()
        self._started_at = time.time()
        self._environments_before = set(_python_environments())
        self._environment: Path | None = None
        self._regions = SHARED_MEMORY / f"conch_{os.getpid()}_{time.monotonic_ns():x}_"
        executable, *arguments = command.arguments
        launcher = Path(__file__).with_name("launch.py")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", str(launcher), str(os.getpid()), executable, *arguments),
                f"--backend-config=python,shm-region-prefix-name={self._regions.name}",
            ],
            env=dict(command.environment),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
        self._will = subprocess.Popen(
            ["/bin/sh", "-c", _LAST_WILL, "conch-last-will", str(self.pid), str(self._regions)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Process id of tritonserver, which is also its process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """What tritonserver ended with, minus the signal's number if killed by one; None while it runs."""
        return self._process.poll()

    @property
    def age_s(self) -> float:
        """Seconds since the start."""
        return time.time() - self._started_at

    def dead_stubs(self) -> set[int]:
        """Return the pids of stubs that have died and that tritonserver has not taken note of.

        A stub that tritonserver ended itself shows up here for a moment at most.
        """
        return {pid for pid in self._children() if _is_zombie(pid)}

    def request_stop(self) -> None:
        """Ask the server to end, giving requests in flight its exit timeout."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def end_requests(self) -> None:
        """Have conch models end the requests that are still in flight, each with an error to its client."""
        for pid in self._children():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if "triton_python_backend_stub" in " ".join(psutil.Process(pid).cmdline()):
                    os.kill(pid, signal.SIGTERM)

    def note_environment(self) -> None:
        """Find the folder that this server's Python backend made in /tmp; call once models are loaded."""
        new = set(_python_environments()) - self._environments_before
        made = sorted((path.stat().st_mtime, path) for path in new if path.exists())
        if made:
            self._environment = made[0][1]
            self._tell_will(str(self._environment))

    def destroy(self) -> None:
        """Kill what is left of the tree, and remove what it left in shared memory and on disk."""
        tree = self._descendants()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._reap([process.pid for process in tree])
        self._remove_traces()
        self._tell_will(_WILL_DONE)
        self._will.communicate()

    def _descendants(self) -> list[psutil.Process]:
        try:
            return list(psutil.Process(self.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []

    def _reap(self, pids: list[int]) -> None:
        """Wait until the group and these processes are gone; orphans among them have become our children."""
        deadline = time.monotonic() + _KILL_S
        while time.monotonic() < deadline:
            for pid in (*pids, -self.pid):
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(pid, os.WNOHANG)[0]:
                        pass
            if not any(map(psutil.pid_exists, pids)) and not _group_exists(self.pid):
                return
            time.sleep(0.01)

    def _children(self) -> Iterator[int]:
        tasks = Path("/proc", str(self.pid), "task")
        try:
            for task in tasks.iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    yield from map(int, (task / "children").read_text().split())
        except FileNotFoundError:
            return

    def _remove_traces(self) -> None:
        for region in self._regions.parent.glob(f"{self._regions.name}*"):
            region.unlink(missing_ok=True)
        if self._environment is not None:
            with contextlib.suppress(OSError):
                self._environment.rmdir()

    def _tell_will(self, line: str) -> None:
        if self._will.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._will.stdin.write(line + "\n")
                self._will.stdin.flush()


def _become_subreaper() -> None:
    """Have orphaned descendants handed to us, so that they can be reaped where there is no init to do it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _python_environments() -> list[Path]:
    folder, pattern = _PYTHON_ENVIRONMENTS
    return list(Path(folder).glob(pattern))


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _is_zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
