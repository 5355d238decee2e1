"""The measurement room is a folder of scripts, not an installed package."""

from __future__ import annotations

import sys
from pathlib import Path

ROOM = Path(__file__).resolve().parents[3] / "perf_analyzer"
sys.path[:0] = [str(ROOM), str(ROOM / "in_process")]
