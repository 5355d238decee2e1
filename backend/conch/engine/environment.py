"""What must be settled before torch is imported."""

from __future__ import annotations

import os


def settle_environment() -> None:
    """Let waiting compute threads sleep instead of spin; variables that the user has set are left alone.

    libgomp reads its policy when it is loaded. Its default is to spin at the end of each parallel region, and
    a model has hundreds of those a step. Where the cores are shared with anyone else, Triton for a start, a
    thread that lost its core keeps all others spinning, and a step takes ten times as long or more. Sleeping
    costs a few microseconds a region on an idle machine.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
