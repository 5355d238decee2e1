"""What one rank does with a plan: batch builder, model runner, sampler, verification."""

from conch.model.place import InMesh
from conch.worker.drafting_parts import DraftLoaders, WorkerPlugins
from conch.worker.following import FollowingWorker
from conch.worker.last_stage import LastStage
from conch.worker.local import LocalWorker
from conch.worker.prepare import Prepared, prepare
from conch.worker.threads import use_threads

__all__ = [
    "DraftLoaders",
    "FollowingWorker",
    "InMesh",
    "LastStage",
    "LocalWorker",
    "Prepared",
    "WorkerPlugins",
    "prepare",
    "use_threads",
]
