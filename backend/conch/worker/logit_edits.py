"""Changes to logits that depend on a request's tokens: penalties, bias, and bans before `min_tokens`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from conch.worker.row_table import RowTable

_ABSOLUTE_BIAS = 100.0
_FORCE = 1e4
"""What a bias of 100 becomes: more than any logits differ by, even at the highest temperature."""


def edit_logits(
    logits: torch.Tensor, table: RowTable, row: int, position: int, eos_token_ids: frozenset[int]
) -> None:
    """Change one row of logits in place: float32 [V].

    In this order: repetition penalty (once for each id among prompt and output, positive logits divided and
    negative ones multiplied), frequency and presence penalty (over the output), bias (one of 100 or -100 is
    absolute), and, until `min_tokens` are there, a ban of every id that would end the output.

    Parameters
    ----------
    position
        Of the token to be sampled; the tokens before it are the ones that count.
    """
    tokens = table.token_ids[row, :position]
    num_prompt = int(table.num_prompt[row])
    if table.repetition[row] != 1:
        seen = _index(np.unique(tokens), logits)
        values = logits[seen]
        penalty = float(table.repetition[row])
        logits[seen] = torch.where(values < 0, values * penalty, values / penalty)
    presence, frequency = float(table.presence[row]), float(table.frequency[row])
    if presence != 0 or frequency != 0:
        ids, counts = np.unique(tokens[num_prompt:], return_counts=True)
        minus = torch.from_numpy(counts * frequency + presence).to(logits)
        logits[_index(ids, logits)] -= minus
    params = table.params[row]
    if params.logit_bias:
        ids = np.fromiter(params.logit_bias.keys(), np.int64)
        bias = np.fromiter(params.logit_bias.values(), np.float64)
        bias = np.where(np.abs(bias) >= _ABSOLUTE_BIAS, np.sign(bias) * _FORCE, bias)
        logits[_index(ids, logits)] += torch.from_numpy(bias).to(logits)
    if position - num_prompt < params.min_tokens:
        banned = np.array([*eos_token_ids, *params.stop_token_ids], np.int64)
        logits[_index(banned, logits)] = float("-inf")


def _index(ids: npt.NDArray[Any], logits: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64)).to(logits.device)
