"""Become a command that dies with the process that started it. Run as a script; imports nothing of ours.

``launch.py PARENT COMMAND [ARGUMENT ...]``. A separate process rather than `subprocess`'s `preexec_fn`,
which must not run Python in a process that has threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel for the signal, then become the command."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(sys.argv[1]):
        raise SystemExit("the starting process died before its child was ready")
    os.execv(sys.argv[2], sys.argv[2:])


main()
