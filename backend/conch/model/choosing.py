"""Which make of a model runs: the fused decoder where it can, else transformers' own modules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from conch.api import AttentionKernel, ConfigError, EngineConfig, StepBatch
from conch.model.attention import PagedStep
from conch.model.causal_model import CausalModel
from conch.model.describe import Description
from conch.model.loading import load_module
from conch.model.logits import Logits
from conch.model.states import KeptStates

Progress = Callable[[str, float], None]

_log = logging.getLogger(__name__)


class Model(Protocol):
    """A loaded model that takes packed rows."""

    def logits(self, batch: StepBatch, step: PagedStep) -> Logits:
        """Run the step and return the logits of its `logit_rows`."""

    def keep_states(self, layers: Sequence[int]) -> KeptStates:
        """Keep what goes into layers from now on; asked once, by whoever drafts from it."""


def load_model(
    description: Description, config: EngineConfig, kernel: AttentionKernel, progress: Progress
) -> Model:
    """Load the model in the make that `model_impl` asks for.

    Parameters
    ----------
    kernel
        The fused decoder needs the native one.

    Raises
    ------
    CheckpointError
        The weights do not fit the model.
    ConfigError
        The configuration asks for the fused decoder, or for what only it can do, where it cannot be had.
    """
    if config.model_impl == "transformers":
        found: Model | str = "model_impl is 'transformers'"
    else:
        found = _load_fused_or_say_why(description, config, kernel, progress)
    if not isinstance(found, str):
        return found
    name = description.spec.name
    if config.model_impl == "fused":
        raise ConfigError(f"model_impl 'fused' cannot serve {name}: {found}")
    if config.quantization is not None:
        raise ConfigError(f"quantization {config.quantization!r} cannot serve {name}: {found}")
    _log.info("%s runs with transformers' modules: %s", name, found)
    return CausalModel(load_module(description, progress))


def _load_fused_or_say_why(
    description: Description, config: EngineConfig, kernel: AttentionKernel, progress: Progress
) -> Model | str:
    from conch_kernels.cpu_attention import NativeAttention

    if not isinstance(kernel, NativeAttention):
        return f"the fused decoder needs attention_kernel 'cpu', not {type(kernel).__name__}"
    from conch.model.fused.load import load_fused
    from conch.model.fused.recognise import NotRecognised

    try:
        return load_fused(description, config, progress)
    except NotRecognised as error:
        return str(error)
