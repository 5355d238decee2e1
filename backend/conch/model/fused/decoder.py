"""A decoder that runs a whole step in one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from conch.api import StepBatch
from conch.model.attention import PagedStep
from conch.model.fused.steps import NativeSteps
from conch.model.logits import Logits
from conch.model.states import KeptStates
from conch_kernels.cpu.native import NativeDecoder, Step


class FusedDecoder:
    """Runs packed rows: `conch.model.causal_model.CausalModel`'s other make.

    Parameters
    ----------
    native
        The decoder, its weights packed.
    """

    def __init__(self, native: NativeDecoder) -> None:
        self._native = native
        self._steps = NativeSteps()
        self._states: KeptStates | None = None
        self._state_layers = (ctypes.c_int32 * 0)()

    def logits(self, batch: StepBatch, step: PagedStep) -> Logits:
        """Run the step and return the logits of its `logit_rows`."""
        team, native_step = self._steps.begin(batch, step)
        if self._states is not None:
            self._make_room(self._states, native_step, batch.input_ids.shape[0])
        values, likeliest = self._native.run(team, native_step)
        return Logits(values, likeliest["column"], likeliest["value"])

    def keep_states(self, layers: Sequence[int]) -> KeptStates:
        """Keep what goes into layers from now on."""
        self._states = KeptStates(layers)
        self._state_layers = (ctypes.c_int32 * len(layers))(*layers)
        return self._states

    def _make_room(self, states: KeptStates, step: Step, num_tokens: int) -> None:
        """Let native code write the states of a step."""
        states.values = torch.empty(num_tokens, len(states.layers), self._native.hidden)
        step.states = states.values.data_ptr()
        step.state_layers = ctypes.addressof(self._state_layers)
        step.num_states = len(states.layers)
