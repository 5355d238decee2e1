"""What one rank does with a plan: batch builder, model runner, sampler, verification."""

from conch.worker.drafting_parts import WorkerPlugins
from conch.worker.local import LocalWorker
from conch.worker.prepare import Prepared, prepare

__all__ = ["LocalWorker", "Prepared", "WorkerPlugins", "prepare"]
