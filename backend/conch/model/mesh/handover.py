"""What a stage hands to the next one: a step's states, and how long each stage so far has computed for it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from conch.api.mesh import Seat

_LINE = 64
"""States begin at a multiple of this many bytes."""


class StageClock:
    """Seconds that each stage has computed for a step: those before as they said, this one as it measures.

    What a stage waits for the one before is not its own.
    """

    def __init__(self, stage: int) -> None:
        self._before = self._none = (0.0,) * stage
        self._began_s = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self._before = self._none
        self._began_s = time.perf_counter()

    def hear(self, before: tuple[float, ...], waited_s: float) -> None:
        """Note what the stages before have taken, and how long it took to hear of it."""
        self._before = before
        self._began_s += waited_s

    def read(self) -> tuple[float, ...]:
        """Return the seconds of the stages up to this one."""
        return (*self._before, time.perf_counter() - self._began_s)


class Handover:
    """A stage's links to the stage before and the one after, of plain tensors over gloo.

    Nobody waits here for what could be under way: receives are posted ahead for all steps that can be in
    flight, so a step's states arrive while the one before it is computed, and a send ends behind the steps
    that follow.

    Parameters
    ----------
    group
        torch's process group of the ranks of one part, by stage.
    seat
        Where this rank sits.

    Attributes
    ----------
    clock
        Of this stage.
    bytes_sent
        States that have been handed on.
    """

    def __init__(self, group: Any, seat: Seat) -> None:  # noqa: ANN401 - not typed by torch
        self._group, self._seat = group, seat
        self._depth = seat.shape.pipeline
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        self._coming: deque[tuple[Any, torch.Tensor]] = deque()
        self._read: torch.Tensor | None = None
        self._width, self._dtype = 0, torch.float32
        self.clock = StageClock(seat.stage)
        self.bytes_sent = 0

    def expect(self, most_tokens: int, width: int, dtype: torch.dtype) -> None:
        """Say what a step's states will be at most, [`most_tokens`, `width`]; called once, first."""
        self._width, self._dtype = width, dtype
        if not self._seat.is_first_stage:
            size = _header(self._seat.stage) + most_tokens * width * dtype.itemsize
            for _ in range(self._depth):
                self._post(torch.empty(size, dtype=torch.uint8))

    def send(self, states: torch.Tensor) -> None:
        """Start to hand a step's states [T, width] on; waits only for those of some steps before."""
        while len(self._sending) >= self._depth:
            self._sending.popleft()[0].wait()
        seconds = self.clock.read()
        header = _header(len(seconds))
        message = torch.empty(header + states.nbytes, dtype=torch.uint8)
        message[: 8 * len(seconds)].view(torch.float64).copy_(torch.tensor(seconds, dtype=torch.float64))
        message[header:].view(self._dtype).view(states.shape).copy_(states)
        self.bytes_sent += states.nbytes
        self._sending.append((self._group.send([message], self._seat.stage + 1, 0), message))

    def take(self, num_tokens: int) -> torch.Tensor:
        """Wait for a step's states [`num_tokens`, width]; they may be read until the next call."""
        began_s = time.perf_counter()
        if self._read is not None:
            self._post(self._read)
        coming, self._read = self._coming.popleft()
        coming.wait()
        stages = self._seat.stage
        seconds, states = self._read[: 8 * stages], self._read[_header(stages) :]
        self.clock.hear(tuple(seconds.view(torch.float64).tolist()), time.perf_counter() - began_s)
        size = num_tokens * self._width * self._dtype.itemsize
        return states[:size].view(self._dtype).view(num_tokens, self._width)

    def close(self) -> None:
        """Forget the links."""
        self._sending.clear()
        self._coming.clear()
        self._group = None

    def _post(self, message: torch.Tensor) -> None:
        """Make a buffer ready for the next message; a shorter one fills its beginning."""
        self._coming.append((self._group.recv([message], self._seat.stage - 1, 0), message))


def _header(stages: int) -> int:
    """Return how many bytes the seconds of so many stages take, rounded up."""
    return -(-8 * stages // _LINE) * _LINE
