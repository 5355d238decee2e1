"""What every drafter promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from conch.api import BuildContext, DraftContext, Drafter, Span
from conch.testing.context import VOCAB_SIZE, make_context


@dataclass
class _Talk:
    """A request as its drafter sees it: tokens, and how many of them the target has computed."""

    id: int
    tokens: list[int]
    computed: int = 0
    drafts: tuple[int, ...] = ()

    def span(self, end: int) -> Span:
        """Compute up to a token."""
        start, self.computed = self.computed, end
        return Span(self.id, start, end, 0)


@dataclass
class _Conversation:
    """Steps of some requests, one after the other."""

    drafter: Drafter
    talks: list[_Talk] = field(default_factory=list)

    def step(self, new: Sequence[Sequence[int]], room: Sequence[int]) -> None:
        """Let each request sample some tokens, and ask what comes next."""
        spans = []
        for talk, tokens in zip(self.talks, new, strict=True):
            talk.tokens += tokens
            spans.append(talk.span(len(talk.tokens) - 1))
        rows = [list(talk.tokens) for talk in self.talks]
        ids = [talk.id for talk in self.talks]
        drafts = self.drafter.propose(DraftContext(ids, rows, room, spans))
        assert len(drafts) == len(rows)
        for talk, draft, most in zip(self.talks, drafts, room, strict=True):
            assert len(draft) <= most
            assert all(0 <= token_id < VOCAB_SIZE for token_id in draft)
            talk.drafts = tuple(draft)


class DrafterContract:
    """Inherit, implement `build`, and let pytest collect the subclass."""

    def build(self, context: BuildContext) -> Drafter:
        """Build the drafter under test."""
        raise NotImplementedError

    def converse(self, *prompts: Sequence[int]) -> _Conversation:
        """Begin to serve prompts."""
        talks = [_Talk(index + 1, list(prompt)) for index, prompt in enumerate(prompts)]
        return _Conversation(self.build(make_context()), talks)

    def test_is_a_drafter(self) -> None:
        """It has the methods of the seam."""
        assert isinstance(self.build(make_context()), Drafter)

    def test_guesses_for_each_row_within_its_room(self) -> None:
        """One guess a row, in order, never longer than is of use, of known tokens."""
        repeating = [1, 2, 3, 4] * 8
        talks = self.converse(repeating, [5], range(40), repeating[:-1], repeating)
        for _ in range(3):
            talks.step([[1], [5], [9], [4], [2]], [4, 8, 0, 1, 0])

    def test_takes_any_number_of_new_tokens(self) -> None:
        """Drafts are accepted or not, one by one."""
        talks = self.converse([7, 8, 9] * 4, [3])
        for count in (1, 4, 2, 7, 1, 1):
            talks.step([[7, 8, 9, 7, 8, 9, 7][:count], [3] * count], [6, 3])

    def test_follows_a_prompt_in_chunks(self) -> None:
        """Steps in which a prompt is computed and nothing sampled, besides one that decodes."""
        talks = self.converse([4, 5, 6] * 10, [8] * 60)
        decoding, waiting = talks.talks
        for end in (20, 40, 59):
            decoding.tokens.append(4)
            spans = [waiting.span(end), decoding.span(len(decoding.tokens) - 1)]
            rows = [list(decoding.tokens)]
            (draft,) = talks.drafter.propose(DraftContext([decoding.id], rows, [3], spans))
            assert len(draft) <= 3
        talks.step([[4], [8]], [3, 3])

    def test_goes_on_after_a_pause(self) -> None:
        """Steps of which it was not told: control has switched drafting off."""
        talks = self.converse([4, 5, 6] * 10, [1, 2])
        talks.step([[4], [3]], [3, 3])
        for talk in talks.talks:
            talk.tokens += [5, 6, 4] * 9
            talk.computed = len(talk.tokens) - 1
        for _ in range(4):
            talks.step([[5], [5]], [3, 3])

    def test_a_request_may_be_near_the_end_of_a_context(self) -> None:
        """Also of a draft model's own, which may be shorter."""
        talks = self.converse([2] * 94)
        for _ in range(12):
            talks.step([[2]], [4])

    def test_nobody_asks(self) -> None:
        """A step in which no row samples."""
        drafter = self.build(make_context())
        assert drafter.propose(DraftContext([], [], [])) == []
        assert drafter.propose(DraftContext([], [], [], [Span(1, 0, 8, 0)])) == []

    def test_forgets_whom_it_never_knew(self) -> None:
        """Unknown ids are ignored."""
        drafter = self.build(make_context())
        drafter.propose(DraftContext([7], [[1, 2, 1, 2, 1]], [3], [Span(7, 0, 4, 0)]))
        for _ in range(2):
            drafter.forget([7, 8])
        assert len(drafter.propose(DraftContext([7], [[3, 4]], [3], [Span(7, 0, 1, 0)]))) == 1
