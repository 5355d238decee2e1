"""What a model returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """Logits of L rows, and the likeliest token of each, which most steps need nothing but.

    Attributes
    ----------
    values : float32 [L, V]
        Valid until the model runs again.
    likeliest : int64 [L]
        Where each row's largest logit is, the first of equals.
    largest : float32 [L]
        That logit; NaN where the row holds one.
    """

    values: torch.Tensor
    likeliest: npt.NDArray[np.int64]
    largest: npt.NDArray[np.float32]

    @classmethod
    def of(cls, values: torch.Tensor) -> Logits:
        """Find the likeliest tokens; on a CPU with numpy, which looks at 16 numbers at a time."""
        if values.device.type == "cpu":
            array: npt.NDArray[Any] = values.numpy()
            likeliest = array.argmax(axis=1)
            return cls(values, likeliest, array[np.arange(len(array)), likeliest])
        largest, where = values.max(dim=1)
        return cls(values, where.cpu().numpy(), largest.cpu().numpy())
