"""What every drafter promises."""

from __future__ import annotations

from conch.api import BuildContext, DraftContext, Drafter
from conch.testing.context import VOCAB_SIZE, make_context


class DrafterContract:
    """Inherit, implement `build`, and let pytest collect the subclass."""

    def build(self, context: BuildContext) -> Drafter:
        """Build the drafter under test."""
        raise NotImplementedError

    def test_is_a_drafter(self) -> None:
        """It has the methods of the seam."""
        assert isinstance(self.build(make_context()), Drafter)

    def test_guesses_for_each_row_within_its_room(self) -> None:
        """One guess a row, in order, never longer than is of use, of known tokens."""
        drafter = self.build(make_context())
        repeating = [1, 2, 3, 4] * 8
        rows = [repeating, [5], list(range(40)), repeating[:-1], repeating]
        room = [4, 8, 0, 1, 0]
        for _ in range(3):
            drafts = drafter.propose(DraftContext(range(len(rows)), rows, room))
            assert len(drafts) == len(rows)
            for draft, most in zip(drafts, room, strict=True):
                assert len(draft) <= most
                assert all(0 <= token_id < VOCAB_SIZE for token_id in draft)

    def test_nobody_asks(self) -> None:
        """A step in which no row samples."""
        assert self.build(make_context()).propose(DraftContext([], [], [])) == []

    def test_forgets_whom_it_never_knew(self) -> None:
        """Unknown ids are ignored."""
        drafter = self.build(make_context())
        drafter.propose(DraftContext([7], [[1, 2, 1, 2, 1]], [3]))
        for _ in range(2):
            drafter.forget([7, 8])
        assert len(drafter.propose(DraftContext([7], [[3, 4]], [3]))) == 1
