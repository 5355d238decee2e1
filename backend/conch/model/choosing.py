"""Which make of a model runs: the fused decoder where it can, else transformers' own modules."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from conch.api import AttentionKernel, ConfigError, StepBatch
from conch.api.config import ModelImpl
from conch.model.attention import PagedStep
from conch.model.causal_model import CausalModel
from conch.model.describe import Description
from conch.model.loading import load_module

Progress = Callable[[str, float], None]

_log = logging.getLogger(__name__)


class Model(Protocol):
    """A loaded model that takes packed rows."""

    def logits(self, batch: StepBatch, step: PagedStep) -> torch.Tensor:
        """Run the step and return the logits of its `logit_rows`: float32 [L, V]."""


def load_model(
    description: Description, kernel: AttentionKernel, impl: ModelImpl, progress: Progress
) -> Model:
    """Load the model in the make that `impl` asks for.

    Parameters
    ----------
    kernel
        The fused decoder needs the native one.

    Raises
    ------
    CheckpointError
        The weights do not fit the model.
    ConfigError
        `impl` is ``fused`` and the model cannot be.
    """
    if impl != "transformers":
        why = _load_fused_or_say_why(description, kernel, progress)
        if not isinstance(why, str):
            return why
        if impl == "fused":
            raise ConfigError(f"model_impl 'fused' cannot serve {description.spec.name}: {why}")
        _log.info("%s runs with transformers' modules: %s", description.spec.name, why)
    return CausalModel(load_module(description, progress))


def _load_fused_or_say_why(
    description: Description, kernel: AttentionKernel, progress: Progress
) -> Model | str:
    from conch_kernels.cpu_attention import NativeAttention

    if not isinstance(kernel, NativeAttention):
        return f"the fused decoder needs attention_kernel 'cpu', not {type(kernel).__name__}"
    from conch.model.fused.load import load_fused
    from conch.model.fused.recognise import NotRecognised, recognise

    try:
        blueprint = recognise(description.meta, description.hf_config, description.spec)
    except NotRecognised as error:
        return str(error)
    return load_fused(description, blueprint, progress)
