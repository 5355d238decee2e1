"""Drawing tokens: temperature, min_p, top_k, top_p, then the inverse of the cumulative distribution.

Letters: N rows, V vocabulary, C the likeliest tokens of a row that are looked at in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from conch.worker.kept_tokens import RowFilter, draw_token, kept_tokens

_HEAD = 256
_MAX_HEAD = 4096
_WIDEN = 16


@dataclass(frozen=True, slots=True, eq=False)
class DrawSettings:
    """How each row draws. All [N], float64 but for `top_k` (int64).

    Attributes
    ----------
    temperature
        Greater than 0.
    top_k
        0 keeps all.
    uniform
        The random number in [0, 1) that decides.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor

    def select(self, rows: torch.Tensor) -> DrawSettings:
        """Return the settings of some rows only."""
        return DrawSettings(*(getattr(self, field.name)[rows] for field in fields(self)))


def draw(logits: torch.Tensor, settings: DrawSettings) -> torch.Tensor:
    """Draw a token for each row of logits [N, V]; returns int64 [N].

    The token is the first, in order of the vocabulary, at which the cumulative probability of the tokens kept
    exceeds the row's random number. Each row is summed by itself, in fp64, so its token does not depend on
    the others and no token's share is lost to rounding.
    """
    weights = _weights(logits, settings)
    is_filtered = _is_filtered(settings, logits.shape[1])
    if not bool(is_filtered.any()):
        return pick(weights, settings.uniform)
    if logits.device.type != "cpu":
        return pick(_filter_rows(weights, settings, is_filtered), settings.uniform)
    token_ids = torch.empty(len(weights), dtype=torch.int64)
    some, others = torch.nonzero(is_filtered).squeeze(1), torch.nonzero(~is_filtered).squeeze(1)
    token_ids[some] = _draw_filtered(weights[some], settings.select(some))
    if len(others):
        token_ids[others] = pick(weights[others], settings.uniform[others])
    return token_ids


def pick(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw from weights [N, V], each row with its number of `uniform`, float64 [N]; returns int64 [N]."""
    cumulative = weights.cumsum(dim=1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = uniform[:, None] * total
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def kept_weights(logits: torch.Tensor, settings: DrawSettings) -> torch.Tensor:
    """Turn logits [N, V] into probabilities up to a factor, 0 for tokens filtered out: float32 [N, V]."""
    weights = _weights(logits, settings)
    return _filter_rows(weights, settings, _is_filtered(settings, logits.shape[1]))


def distribution(logits: torch.Tensor, settings: DrawSettings) -> torch.Tensor:
    """Turn logits [N, V] into the probabilities that `draw` draws with: float32 [N, V]."""
    if logits.device.type == "cpu":
        weights = _weights(logits, settings)
        _filter_on_host(weights, settings, torch.nonzero(_is_filtered(settings, logits.shape[1])).squeeze(1))
    else:
        weights = kept_weights(logits, settings)
    return weights.div_(weights.sum(dim=1, dtype=torch.float64)[:, None].float())


def _weights(logits: torch.Tensor, settings: DrawSettings) -> torch.Tensor:
    """Turn logits [N, V] into probabilities up to a factor, the largest 1: float32 [N, V]."""
    shifted = logits - logits.amax(dim=1, keepdim=True)  # at most 0: no temperature overflows
    return shifted.div_(settings.temperature[:, None].float()).exp_()


def _is_filtered(settings: DrawSettings, vocab_size: int) -> torch.Tensor:
    """Return which rows leave tokens out: bool [N]."""
    limited = (settings.top_k > 0) & (settings.top_k < vocab_size)
    return limited | (settings.top_p < 1) | (settings.min_p > 0)


def _draw_filtered(weights: torch.Tensor, settings: DrawSettings) -> torch.Tensor:
    """Draw on the host from weights [N, V], each row by itself; returns int64 [N]."""
    totals = weights.sum(dim=1, dtype=torch.float64).tolist()
    drawn = map(draw_token, weights.numpy(), totals, _row_filters(settings))
    return torch.tensor(list(drawn), dtype=torch.int64)


def _filter_on_host(weights: torch.Tensor, settings: DrawSettings, which: torch.Tensor) -> None:
    """Set what the rows `which`, int64, leave out of weights [N, V] to 0, each row by itself."""
    some = weights[which]
    totals = some.sum(dim=1, dtype=torch.float64).tolist()
    filters = _row_filters(settings.select(which))
    array = weights.numpy()
    for at, row, total, one in zip(which.tolist(), some.numpy(), totals, filters, strict=True):
        token_ids = kept_tokens(row, total, one)
        array[at] = 0
        array[at, token_ids] = row[token_ids]


def _row_filters(settings: DrawSettings) -> Iterator[RowFilter]:
    numbers = (settings.top_k, settings.top_p, settings.min_p, settings.uniform)
    return map(RowFilter, *(number.tolist() for number in numbers))


def _filter_rows(weights: torch.Tensor, settings: DrawSettings, which: torch.Tensor) -> torch.Tensor:
    """Set what the rows `which`, bool [N], leave out of weights [N, V] to 0."""
    some = torch.nonzero(which).squeeze(1)
    if len(some):
        chosen = settings.select(some)
        vocab_size = weights.shape[1]
        reach = int(torch.where(chosen.top_k < vocab_size, chosen.top_k, 0).max())
        head = vocab_size if reach > _MAX_HEAD else min(max(reach, _HEAD), vocab_size)
        weights[some] = _filtered(weights[some], chosen, head)
    return weights


def _filtered(weights: torch.Tensor, settings: DrawSettings, head: int) -> torch.Tensor:
    """Keep of weights [N, V], whose largest is 1, what min_p, then top_k, then top_p keep.

    top_p is a share of what the other two left. Each keeps a number of likeliest tokens, so the smallest
    number counts. Among equals the first in order of the vocabulary are kept. Only the `head` likeliest are
    sorted; rows for which these do not settle it are done again with more.
    """
    vocab_size = weights.shape[1]
    weights = weights * (weights >= settings.min_p[:, None].float())
    top_k = torch.where(settings.top_k > 0, settings.top_k, vocab_size).clamp(max=vocab_size)
    keep_all = (settings.top_p >= 1) & (top_k >= vocab_size)
    if bool(keep_all.all()):
        return weights
    ordered = weights.topk(head, dim=1).values
    cumulative = ordered.cumsum(dim=1, dtype=torch.float64)
    within = top_k.clamp(max=head)[:, None] - 1
    total = torch.where(
        top_k <= head, cumulative.gather(1, within).squeeze(1), weights.sum(dim=1, dtype=torch.float64)
    )
    enough = settings.top_p * total
    count = (cumulative < enough[:, None]).sum(dim=1) + 1
    count = torch.where(settings.top_p >= 1, top_k, torch.minimum(count, top_k))
    kept = _keep_likeliest(weights, ordered, count.clamp(max=head))
    kept = torch.where(keep_all[:, None], weights, kept)
    again = torch.nonzero((count > head) & ~keep_all).squeeze(1)
    if len(again):
        wider = min(_WIDEN * head, vocab_size)
        kept[again] = _filtered(weights[again], settings.select(again), wider)
    return kept


def _keep_likeliest(weights: torch.Tensor, ordered: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Keep the `count` [N] likeliest of weights [N, V], whose likeliest [N, C] are `ordered`."""
    least = ordered.gather(1, count[:, None] - 1)
    above = weights > least
    equal = weights == least
    room = count[:, None] - above.sum(dim=1, keepdim=True)
    if bool((equal.sum(dim=1, keepdim=True) > room).any()):
        equal &= equal.cumsum(dim=1) <= room
    return weights * (above | equal)
