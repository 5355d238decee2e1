"""What one rank does with a plan: batch builder, model runner, sampler, verification."""

from conch.worker.local import LocalWorker
from conch.worker.prepare import Prepared, prepare

__all__ = ["LocalWorker", "Prepared", "prepare"]
