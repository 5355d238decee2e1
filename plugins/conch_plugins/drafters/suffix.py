"""`suffix`: what most often followed the last tokens, here and in the outputs of others.

Oliaro et al., "SuffixDecoding: extreme speculative decoding for emerging AI applications", 2024, with an
index over plain arrays in place of the suffix trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from conch.api import DraftContext, SpeculativeConfig
from conch_plugins.drafters.corpus import KEY_TOKENS, Corpus
from conch_plugins.drafters.ngram import longest_matches, repeat_from

if TYPE_CHECKING:
    from conch.api import Drafter

_CORPUS_TOKENS = 1 << 18
_MOST_OWN = 32

Tokens = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Output:
    """What a request has put out, as far as it is known, and where its output begins."""

    begin: int
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Guess:
    """Tokens, and how many of them are expected to be right."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0


class SuffixDrafter:
    """Drafts from the longest match of the last tokens: in the request itself, or in outputs that ended.

    Among all places of that match the token that followed most often is taken, then the one that followed
    that, for as long as they stay likely enough. The longer the match, the longer the draft.

    Parameters
    ----------
    settings
        The keys ``suffix_*``.
    """

    def __init__(self, settings: SpeculativeConfig) -> None:
        self._depth = settings.suffix_decoding_max_tree_depth
        self._factor = settings.suffix_decoding_max_spec_factor
        self._least = settings.suffix_decoding_min_token_prob
        self._corpus = Corpus(_CORPUS_TOKENS, settings.suffix_decoding_max_cached_requests)
        self._outputs: dict[int, _Output] = {}

    def propose(self, context: DraftContext) -> list[tuple[int, ...]]:
        """Look up each row that has room, and note what each has put out."""
        drafts = []
        for request_id, view, room in zip(context.request_ids, context.token_ids, context.room, strict=True):
            tokens = np.asarray(view, np.int32)
            self._note(request_id, tokens)
            drafts.append(self._guess(tokens, room) if room else ())
        return drafts

    def forget(self, request_ids: Sequence[int]) -> None:
        """Remember the outputs of requests that ended."""
        for request_id in request_ids:
            output = self._outputs.pop(request_id, None)
            if output is not None:
                self._corpus.add(output.tokens)

    def _note(self, request_id: int, tokens: Tokens) -> None:
        output = self._outputs.get(request_id)
        if output is None:
            output = self._outputs[request_id] = _Output(len(tokens) - 1)
        output.tokens += tokens[output.begin + len(output.tokens) :].tolist()

    def _guess(self, tokens: Tokens, room: int) -> tuple[int, ...]:
        own, others = self._in_own(tokens, room), self._in_others(tokens, room)
        return own.tokens if own.score >= others.score else others.tokens

    def _in_own(self, tokens: Tokens, room: int) -> _Guess:
        ends, length = longest_matches(tokens, self._depth)
        count = self._count(length, room)
        if not count:
            return _Guess()
        latest = ends[-_MOST_OWN:].tolist()
        return self._follow([repeat_from(tokens, end + 1, count) for end in latest])

    def _in_others(self, tokens: Tokens, room: int) -> _Guess:
        if len(tokens) < KEY_TOKENS or not len(self._corpus):
            return _Guess()
        last = tokens[-self._depth :].tolist()
        places = self._corpus.places(last[-2], last[-1])
        if not len(places):
            return _Guess()
        back = -np.arange(len(last))
        same = self._corpus.window(places, back) == np.array(last[::-1])
        lengths = np.cumprod(same, axis=1).sum(axis=1)
        length = int(lengths.max())
        count = self._count(length, room)
        if not count:
            return _Guess()
        following = self._corpus.window(places[lengths == length], 1 + np.arange(count))
        return self._follow(following.tolist())

    def _count(self, length: int, room: int) -> int:
        """Return how long a draft may be after a match of `length` tokens."""
        return min(room, int(self._factor * length))

    def _follow(self, following: list[list[int]]) -> _Guess:
        """Go with the majority: `following` are the tokens that came after each place, as many for each."""
        total = len(following)
        chosen: list[int] = []
        score = 0.0
        for column in range(len(following[0])):
            token, count = _most_common([row[column] for row in following])
            share = count / total
            if token < 0 or share < self._least:
                break
            chosen.append(token)
            score += share
            if count < len(following):
                following = [row for row in following if row[column] == token]
        return _Guess(tuple(chosen), score)


def _most_common(tokens: list[int]) -> tuple[int, int]:
    """Return the most frequent token, of several the last to come first, and how often it is there."""
    if len(tokens) == 1:
        return tokens[0], 1
    counts: dict[int, int] = {}
    for token in tokens:
        counts[token] = counts.get(token, 0) + 1
    best = max(reversed(counts), key=counts.__getitem__)
    return best, counts[best]


if TYPE_CHECKING:
    _: type[Drafter] = SuffixDrafter
