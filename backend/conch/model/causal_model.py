"""A loaded model, as the worker runs it."""

from __future__ import annotations

from typing import Any

import torch

from conch.api import StepBatch
from conch.model.attention import STEP_KEYWORD, Step


class CausalModel:
    """A transformers model that takes packed rows.

    Parameters
    ----------
    module
        A ``...ForCausalLM`` with our attention.
    """

    def __init__(self, module: Any) -> None:  # noqa: ANN401 - transformers is not typed
        self.module = module

    def logits(self, batch: StepBatch, step: Step) -> torch.Tensor:
        """Run the step and return the logits of its `logit_rows`: float32 [L, V].

        The head runs on those rows only, with whatever the model does after it (soft cap, scale).
        """
        output = self.module(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            return_dict=True,
            **{STEP_KEYWORD: step},
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits
