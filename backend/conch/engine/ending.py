"""Where an output ends."""

from __future__ import annotations

from collections.abc import Sequence

from conch.api.request import Request
from conch.api.steps import FinishReason


def cut(
    request: Request, token_ids: Sequence[int], eos_token_ids: frozenset[int]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Cut new tokens where the request ends.

    A token that ends the answer is part of it; when it is also the last one allowed, the reason is
    ``stop``. Tokens behind the end (accepted drafts) are dropped.

    Returns
    -------
    The tokens to keep, and the reason to end or None to go on.
    """
    params, num_tokens = request.params, len(request.token_ids)
    own = frozenset() if params.ignore_eos else eos_token_ids
    for index, token_id in enumerate(token_ids, start=1):
        output = num_tokens + index - request.num_prompt
        if (token_id in own or token_id in params.stop_token_ids) and output >= params.min_tokens:
            return tuple(token_ids[:index]), FinishReason.STOP
        if num_tokens + index >= request.limit:
            return tuple(token_ids[:index]), FinishReason.LENGTH
    return tuple(token_ids), None
