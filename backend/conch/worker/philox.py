"""Random numbers without state: Philox4x32-10, a cipher that turns (key, counter) into 128 random bits.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The draw for a token
is a function of the request's seed, the token's position and what it is drawn for. Nothing has to be saved
over a preemption, and neighbours in a batch cannot shift it.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10


class Purpose(IntEnum):
    """What a number decides: no two decisions about a position share one."""

    DRAW = 0
    """The token, from the target's distribution."""
    ACCEPT = 1
    """Whether a draft is accepted."""
    RESIDUAL = 2
    """The token in place of a rejected draft."""
    DRAFT = 3
    """The draft, from the drafter's distribution."""


def philox4x32(counter: U64, key: U64) -> U64:
    """Encrypt counters.

    Parameters
    ----------
    counter : uint64 [4, L]
        Words below 2**32.
    key : uint64 [2, L]
        Words below 2**32.

    Returns
    -------
    uint64 [4, L]
        Words below 2**32.
    """
    first, second, third, fourth = counter
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = _MULTIPLIERS[0] * first, _MULTIPLIERS[1] * third
        first, second, third, fourth = (
            (product_1 >> _SHIFT) ^ second ^ key_0,
            product_1 & _LOW,
            (product_0 >> _SHIFT) ^ fourth ^ key_1,
            product_0 & _LOW,
        )
        key_0, key_1 = (key_0 + _WEYL[0]) & _LOW, (key_1 + _WEYL[1]) & _LOW
    return np.stack([first, second, third, fourth])


def uniforms(
    seeds: U64, positions: npt.NDArray[np.int64], purpose: Purpose = Purpose.DRAW
) -> npt.NDArray[np.float64]:
    """Draw one number in [0, 1) for each (seed, position): float64 [L] of 53 random bits."""
    where = positions.astype(np.uint64)
    zeros = np.zeros_like(where)
    words = philox4x32(
        np.stack([where & _LOW, where >> _SHIFT, zeros + np.uint64(purpose), zeros]),
        np.stack([seeds & _LOW, seeds >> _SHIFT]),
    )
    bits = ((words[0] << _SHIFT) | words[1]) >> np.uint64(11)
    drawn: npt.NDArray[np.float64] = bits * 2.0**-53
    return drawn
