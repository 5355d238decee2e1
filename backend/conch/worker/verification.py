"""Which of the tokens decided in a step count, where drafts were guessed ahead.

At each place of a row a token is decided as if all drafts before it were right. A draft that equals what was
decided at its place makes the next place valid; the first that differs ends it. How a place is decided
depends on where its draft comes from:

* A guess (prompt lookup, say, or what is likeliest to a draft model): the token is sampled with the random
  number of its position, as if no draft had been there. A seeded request gets the very tokens of a run
  without drafts, greedy or not, whatever shares its batch.
* A draw x from a distribution q: with p the target's distribution after penalties, bias, temperature and
  filters, x is taken with probability ``min(1, p(x) / q(x))``; otherwise the token is drawn from what p has
  more than q, ``max(0, p - q)``, normalised. So the token has distribution p exactly, and x is taken as often
  as any such rule can (Leviathan et al., "Fast inference from transformers via speculative decoding", 2023;
  Chen et al., "Accelerating large language model decoding with speculative sampling", 2023). A seeded request
  gets tokens of the same law as without drafts, but not the same tokens. They are functions of its seed and
  of where drafts stood, so they are repeated where as many tokens are drafted as before; other requests do
  not enter otherwise.

The law holds whatever the drafter does, provided that *whether* a place has a draft does not depend on the
token drawn for it: a drafter may stop before a place, never take back what it drew there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from conch.worker.drawing import pick


@dataclass(frozen=True, slots=True, eq=False)
class DrawnDraft:
    """A draft, and what it was drawn from.

    Attributes
    ----------
    probability
        ``q(token_id)``.
    distribution
        q: float32 [V].
    """

    token_id: int
    probability: float
    distribution: torch.Tensor


def accepted_count(drafts: Sequence[int], decided: Sequence[int]) -> int:
    """Return how many of `decided` (one more than `drafts`) count: the drafts that were right, and one."""
    for index, draft in enumerate(drafts):
        if draft != decided[index]:
            return index + 1
    return len(drafts) + 1


def decide(
    targets: torch.Tensor, drafts: Sequence[DrawnDraft], accept: torch.Tensor, residual: torch.Tensor
) -> list[int]:
    """Decide the token at each of N places with drawn drafts.

    Parameters
    ----------
    targets : float32 [N, V]
        p; 0 for tokens filtered out.
    drafts
        Of each place.
    accept, residual : float64 [N]
        Random numbers in [0, 1).
    """
    token_ids = [draft.token_id for draft in drafts]
    index = torch.tensor(token_ids, device=targets.device)[:, None]
    wanted = targets.gather(1, index).squeeze(1)
    drafted = torch.tensor([draft.probability for draft in drafts], device=targets.device)
    rejected = torch.nonzero(accept * drafted >= wanted).squeeze(1)
    at = rejected.tolist()
    if at:
        lost = torch.stack([drafts[place].distribution for place in at])
        kept = targets[rejected]
        drawn = _draw_left((kept - lost).clamp_(min=0.0), kept, residual[rejected])
        for place, token_id in zip(at, drawn, strict=True):
            token_ids[place] = token_id
    return token_ids


def _draw_left(left: torch.Tensor, targets: torch.Tensor, uniform: torch.Tensor) -> list[int]:
    """Draw from `left` [N, V], or from `targets` where rounding has left nothing: there p is q."""
    is_empty = left.sum(dim=1) <= 0
    drawn = pick(torch.where(is_empty[:, None], targets, left), uniform)
    return [int(token_id) for token_id in drawn.tolist()]
