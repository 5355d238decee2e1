"""A loaded model, as the worker runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from conch.api import StepBatch
from conch.model.attention import STEP_KEYWORD, Step
from conch.model.logits import Logits
from conch.model.states import KeptStates


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

    def keep_states(self, layers: Sequence[int]) -> KeptStates:
        """Keep what goes into layers from now on."""
        states = KeptStates(layers)
        model = self.module.get_decoder()
        parts = [*model.layers, model.norm]
        seen: list[torch.Tensor] = []

        def note(_: object, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
            seen.append((args[0] if args else kwargs["hidden_states"])[0])
            if len(seen) == len(states.layers):
                states.values = torch.stack(seen, dim=1)
                seen.clear()

        for index in layers:
            parts[index].register_forward_pre_hook(note, with_kwargs=True)
        return states
