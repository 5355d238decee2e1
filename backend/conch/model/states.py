"""What goes into a model's layers, kept for those who draft from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class KeptStates:
    """The stream of the last step as it went into some layers.

    Parameters
    ----------
    layers
        Rising numbers of layers; one past the last is what comes out of that, before the final norm.

    Attributes
    ----------
    values : [T, A, h]
        Of all tokens of the step. The next step has a tensor of its own.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        assert layers and list(layers) == sorted(set(layers)), "layers are asked for once, in order"
        self.layers = tuple(layers)
        self.values = torch.empty(0, len(layers), 0)
