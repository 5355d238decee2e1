"""What one rank does with a plan: batch builder, model runner, sampler, verification."""

from conch.worker.drafting_parts import DraftLoaders, WorkerPlugins
from conch.worker.local import LocalWorker
from conch.worker.prepare import Prepared, prepare

__all__ = ["DraftLoaders", "LocalWorker", "Prepared", "WorkerPlugins", "prepare"]
