"""Stop strings in a stream of text: nothing that could be part of one is given away early."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol


class StopFinder(Protocol):
    """Looks for stop strings in the text of one choice."""

    @property
    def has_matched(self) -> bool:
        """Whether a stop string was found. Nothing may be fed from then on."""

    def feed(self, text: str, *, armed: bool) -> str:
        """Take more text; returns what is safe to give away.

        Parameters
        ----------
        armed
            Whether a stop string that ends in this text counts.
        """

    def flush(self) -> str:
        """Return what was held back, when no text follows."""


class NoStops:
    """The finder of a request without stop strings."""

    has_matched = False

    def feed(self, text: str, *, armed: bool) -> str:
        """Return the text: all of it is safe."""
        return text

    def flush(self) -> str:
        """Return nothing: nothing is ever held back."""
        return ""


class StopPatterns:
    """The stop strings of a request as an Aho-Corasick automaton, shared by its choices.

    A state is the longest end of the text so far that begins a stop string, so its depth is what must be
    held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._match = [0]
        for stop in stops:
            self._add(stop)
        self._link()

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)

    def match(self, state: int) -> int:
        """Length of the longest stop string that ends here, 0 for none."""
        return self._match[state]

    def held(self, state: int) -> int:
        """Characters at the end of the text that may still grow into a stop string."""
        while not self._next[state] and state:
            state = self._fail[state]
        return self._depth[state]

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._match.append(0)
            state = self._next[state][character]
        self._match[state] = len(stop)

    def _link(self) -> None:
        """Point each state at the longest proper end of it that is a state too, shallow ones first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], character)
                queue.append(child)
            self._match[state] = self._match[state] or self._match[self._fail[state]]


class StopStrings:
    """Finds the stop string that ends first; of those that end together, the longest.

    Parameters
    ----------
    patterns
        The stop strings.
    include
        Whether the text given away includes the stop string.
    """

    def __init__(self, patterns: StopPatterns, *, include: bool) -> None:
        self._patterns = patterns
        self._include = include
        self._state = 0
        self._held = ""
        self.has_matched = False

    def feed(self, text: str, *, armed: bool) -> str:
        """Take more text; returns what is safe to give away. See `StopFinder.feed`."""
        pending = self._held + text
        for index, character in enumerate(text, start=len(self._held) + 1):
            self._state = self._patterns.step(self._state, character)
            if armed and (length := self._patterns.match(self._state)):
                self.has_matched = True
                self._held = ""
                return pending[: index if self._include else index - length]
        safe = len(pending) - self._patterns.held(self._state)
        self._held = pending[safe:]
        return pending[:safe]

    def flush(self) -> str:
        """Return what was held back, when no text follows."""
        held, self._held = self._held, ""
        return held
