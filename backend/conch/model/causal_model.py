"""A loaded model, as the worker runs it."""

from __future__ import annotations

from typing import Any

from conch.api import StepBatch
from conch.model.attention import STEP_KEYWORD, Step
from conch.model.logits import Logits


class CausalModel:
    """A transformers model that takes packed rows.

    Parameters
    ----------
    module
        A ``...ForCausalLM`` with our attention.
    """

    def __init__(self, module: Any) -> None:  # noqa: ANN401 - transformers is not typed
        self.module = module

    def logits(self, batch: StepBatch, step: Step) -> Logits:
        """Run the step and return the logits of its `logit_rows`.

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
        return Logits.of(output.logits[0].float())
