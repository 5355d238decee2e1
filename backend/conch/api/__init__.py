"""All that a plugin author may import. Importing it loads neither torch nor transformers."""

from conch.api.batch import AttentionLayer, StepBatch
from conch.api.config import EngineConfig
from conch.api.context import BuildContext
from conch.api.drafting import DraftContext, DraftHead, DraftModel, Span
from conch.api.errors import (
    CheckpointError,
    ConchError,
    ConfigError,
    ErrorCode,
    PluginError,
    RequestError,
)
from conch.api.hookspecs import API_VERSION, hookimpl, hookspec
from conch.api.model_spec import AttentionSpec, ModelSpec
from conch.api.planning import PlanBuilder
from conch.api.prefix_caching import Match, PrefixCache, PrefixCacheStats
from conch.api.request import Request, Requests
from conch.api.routing import ReplicaLoad, RoutedRequest, Router
from conch.api.sampling import SamplingParams
from conch.api.seams import (
    AttentionKernel,
    BlockUpdate,
    Drafter,
    KVConnector,
    KVManager,
    Parallelism,
    ReleaseEffect,
    Scheduler,
    StepObserver,
    Worker,
)
from conch.api.sharing import EmptyLine, Line, PromptTurns
from conch.api.speculative import SpeculativeConfig
from conch.api.steps import (
    NO_BLOCK,
    Admission,
    Arena,
    Failure,
    FinishReason,
    Move,
    RequestOutput,
    Row,
    RowResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
    Usage,
)

__all__ = [
    "API_VERSION",
    "NO_BLOCK",
    "Admission",
    "Arena",
    "AttentionKernel",
    "AttentionLayer",
    "AttentionSpec",
    "BlockUpdate",
    "BuildContext",
    "CheckpointError",
    "ConchError",
    "ConfigError",
    "DraftContext",
    "DraftHead",
    "DraftModel",
    "Drafter",
    "EmptyLine",
    "EngineConfig",
    "ErrorCode",
    "Failure",
    "FinishReason",
    "KVConnector",
    "KVManager",
    "Line",
    "Match",
    "ModelSpec",
    "Move",
    "Parallelism",
    "PlanBuilder",
    "PluginError",
    "PrefixCache",
    "PrefixCacheStats",
    "PromptTurns",
    "ReleaseEffect",
    "ReplicaLoad",
    "Request",
    "RequestError",
    "RequestOutput",
    "Requests",
    "RoutedRequest",
    "Router",
    "Row",
    "RowResult",
    "SamplingParams",
    "Scheduler",
    "Span",
    "SpeculativeConfig",
    "StepBatch",
    "StepObserver",
    "StepPlan",
    "StepResult",
    "TokenLogprobs",
    "Usage",
    "Worker",
    "hookimpl",
    "hookspec",
]
