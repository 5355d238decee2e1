"""Contract suites: one for each seam, for pytest, to run on a plugin of your own.

Inherit the suite and say how to build the plugin::

    from conch.testing import SchedulerContract

    class TestMyScheduler(SchedulerContract):
        def build(self, context):
            return MyScheduler(context)

A suite asks only what its seam promises in `conch.api.seams`. Those of attention kernels need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from conch.testing.context import make_context
from conch.testing.drafter import DrafterContract
from conch.testing.kv_connector import KVConnectorContract
from conch.testing.kv_manager import KVManagerContract
from conch.testing.parallelism import ParallelismContract
from conch.testing.prefix_cache import PrefixCacheContract
from conch.testing.ranks import ListeningRanks
from conch.testing.router import RouterContract
from conch.testing.scheduler import SchedulerContract
from conch.testing.shadow import ShadowPool, history
from conch.testing.simulation import Simulation

if TYPE_CHECKING:
    from conch.testing.attention import AttentionKernelContract

__all__ = [
    "AttentionKernelContract",
    "DrafterContract",
    "KVConnectorContract",
    "KVManagerContract",
    "ListeningRanks",
    "ParallelismContract",
    "PrefixCacheContract",
    "RouterContract",
    "SchedulerContract",
    "ShadowPool",
    "Simulation",
    "history",
    "make_context",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - torch is imported only by those who test a kernel
    if name == "AttentionKernelContract":
        from conch.testing.attention import AttentionKernelContract

        return AttentionKernelContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
