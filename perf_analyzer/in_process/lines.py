"""The worker's end of `loadgen.worker`: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(
    start: Callable[[dict[str, Any]], tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]],
) -> None:
    """Start with the options of the command line, say what is ready, then answer until the input ends.

    Whatever libraries print goes to the error stream, so that answers stay alone on the output.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    ready, answer = start(json.loads(sys.argv[1]))
    answers.write(json.dumps(ready) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
