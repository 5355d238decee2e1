"""What to do about a model whose engine does not come back: its readiness must not say otherwise."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback

from conch.host.pb import PbUtils
from conch.host.settings import is_supervised

_LAST_WORDS_S = 0.5


def surrender(pb_utils: PbUtils, model: str, reason: str) -> None:
    """Make Triton stop calling the model ready.

    Under ``conch serve`` this process ends itself: the supervisor sees it and starts the server again, which
    is not ready until the model has loaded. Otherwise the model is unloaded, which only the explicit model
    control mode allows; in the other modes Triton offers no way, and requests are refused at once.
    """
    print(f"conch: the engine of {model} {reason}", file=sys.stderr, flush=True)
    if is_supervised():
        time.sleep(_LAST_WORDS_S)  # for the errors that are being sent to clients
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        pb_utils.unload_model(model)
    except Exception:
        traceback.print_exc(file=sys.stderr)
