"""What ranks tell each other in a step, from sizes alone: the formula that the counters of a group must meet.

Letters: T tokens of a step, L of them with logits, h the width of a token's states, V the vocabulary, E the
parts that share experts, k the experts of a token.

With E parts a step's rows are divided among them, so each has T / E of the tokens on average, and what one
rank says is expected rather than certain; over all ranks it is certain, but for what goes where the router
sends it. KV blocks that rows bring along when they change parts are not in it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from conch.api.mesh import Seat

_COUNT_BYTES = 8
"""Of a number of tokens."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Payload in bytes that one rank puts into collectives, whatever the wire makes of it.

    Attributes
    ----------
    reduced
        All-reduces of states over the ranks that share layers.
    gathered
        Logits, brought to rank 0.
    sent
        States for the next stage.
    exchanged
        Tokens for experts of other parts, and what these made of them.
    counted
        How many tokens go to which expert.
    """

    reduced: float = 0
    gathered: float = 0
    sent: float = 0
    exchanged: float = 0
    counted: float = 0

    def __add__(self, other: Traffic) -> Traffic:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Traffic(*(mine + its for mine, its in pairs))

    def __sub__(self, other: Traffic) -> Traffic:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Traffic(*(mine - its for mine, its in pairs))

    @property
    def total(self) -> float:
        """Of all kinds."""
        return float(sum(dataclasses.astuple(self)))


@dataclass(frozen=True, slots=True)
class Speech:
    """What there is to tell of each token, at one rank.

    Attributes
    ----------
    seat
        Where the rank sits.
    width
        h.
    itemsize
        Bytes of one number.
    sums
        How often a token's states are added up over ranks that share layers: behind each row-parallel layer,
        behind experts whose inner width is divided, and behind the embedding.
    vocabulary
        V.
    expert_layers
        Layers with experts in this stage.
    chosen
        k.
    slots
        Places for experts in such a layer, over all parts.
    """

    seat: Seat
    width: int
    itemsize: int
    sums: int
    vocabulary: int
    expert_layers: int = 0
    chosen: int = 0
    slots: int = 0

    def of_step(self, tokens: int, logits: int) -> Traffic:
        """Return what a step of T tokens, L of them with logits, makes this rank say."""
        return Traffic(
            reduced=reduced_bytes(tokens, self),
            gathered=gathered_bytes(logits, self),
            sent=sent_bytes(tokens, self),
            exchanged=exchanged_bytes(tokens, self),
            counted=counted_bytes(self),
        )


def own_share(number: int, seat: Seat) -> float:
    """Return what a part has of a step's tokens, or of its logits: all where rows are not divided."""
    parts = seat.shape.expert
    return number if parts == 1 else number / parts


def reduced_bytes(tokens: int, speech: Speech) -> float:
    """Return T / E h for each sum, where ranks share layers."""
    if speech.seat.shape.tensor == 1:
        return 0
    return own_share(tokens, speech.seat) * speech.width * speech.itemsize * speech.sums


def gathered_bytes(logits: int, speech: Speech) -> float:
    """Return what logits cost in the last stage.

    Where ranks share the head, L / E times the columns of the widest part of V. Where rows are divided, all
    parts but the first then send L / E whole rows of V there.
    """
    seat = speech.seat
    if not seat.is_last_stage:
        return 0
    own, parts = own_share(logits, seat), seat.shape.tensor
    columns = -(-speech.vocabulary // parts) if parts > 1 else 0
    if seat.expert_part and not seat.part:
        columns += speech.vocabulary
    return own * columns * speech.itemsize


def sent_bytes(tokens: int, speech: Speech) -> float:
    """Return T / E h, for every stage but the last one."""
    if speech.seat.is_last_stage:
        return 0
    return own_share(tokens, speech.seat) * speech.width * speech.itemsize


def exchanged_bytes(tokens: int, speech: Speech) -> float:
    """Return 2 T / E k h (E - 1) / E for each layer with experts, which all parts are equally likely to have.

    Once for tokens that go to experts of other parts, and once for what comes back from here to others.
    """
    parts = speech.seat.shape.expert
    if parts == 1:
        return 0
    away = own_share(tokens, speech.seat) * speech.chosen * (parts - 1) / parts
    return 2 * away * speech.width * speech.itemsize * speech.expert_layers


def counted_bytes(speech: Speech) -> float:
    """Return a number for each slot of each layer with experts, whatever T is, where parts share experts."""
    return _COUNT_BYTES * speech.slots * speech.expert_layers if speech.seat.shape.expert > 1 else 0
