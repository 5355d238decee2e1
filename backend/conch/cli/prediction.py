"""What a step takes on a machine that is not at hand: a roofline for each stage, and the collectives on top.

Nothing overlaps with anything, except stages of a pipeline with each other where there are requests enough;
the host's own work and drafts are left out. A prediction is for comparing topologies, and no measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conch.cli.hardware import Assumptions, Device
from conch.model.mesh.holding import Holding

_COLLECTIVES_OF_EXPERTS = 3
"""Counts, tokens there, tokens back."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a step computes.

    Attributes
    ----------
    rows
        Requests in it.
    tokens
        Of each.
    context
        Tokens that each has KV of, those of the step included.
    """

    rows: int
    tokens: int
    context: int

    @property
    def total(self) -> int:
        """Tokens in all; every row has one of them whose logits are wanted."""
        return self.rows * self.tokens


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predicts for the ranks of one engine."""

    holdings: Sequence[Holding]
    device: Device
    assumed: Assumptions

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits beside the weights; 0 where not even these fit."""
        return min(self._kv_tokens(holding) for holding in self.holdings)

    def step_s(self, load: Load) -> float:
        """Return what a step takes from its beginning in the first stage to its end in the last one."""
        return sum(self._stages_s(load))

    def decode_s(self, requests: int, context: int) -> float:
        """Return what a token of each of so many requests takes, all of which decode.

        Requests divide into as many groups as there are stages, each group a step of its own: the slowest
        stage then never waits. Fewer requests than stages go through one by one.
        """
        stages = self.holdings[0].seat.shape.pipeline
        groups = min(stages, requests)
        times = self._stages_s(Load(-(-requests // groups), 1, context))
        return max(sum(times), groups * max(times))

    def _stages_s(self, load: Load) -> list[float]:
        """Return the time of each stage: that of its slowest rank."""
        times: dict[int, float] = {}
        for holding in self.holdings:
            stage = holding.seat.stage
            seconds = self._compute_s(holding, load) + self._tell_s(holding, load)
            times[stage] = max(seconds, times.get(stage, 0.0))
        return [times[stage] for stage in sorted(times)]

    def _compute_s(self, holding: Holding, load: Load) -> float:
        """Return the longer of reading what is needed and multiplying it."""
        weights, rows = holding.weights, _busiest(holding, load)
        tokens = rows * load.tokens
        read = weights.layers + weights.head + weights.experts * _hit(holding, load.total)
        read_bytes = read * holding.speech.itemsize + rows * load.context * holding.kv_bytes
        products = weights.layers * tokens + weights.head * rows + _of_experts(holding, load.total)
        operations = 2 * products + tokens * _attention_operations(holding, load)
        return max(
            read_bytes / (self.device.bandwidth * self.assumed.of_bandwidth),
            operations / (self.device.operations * self.assumed.of_operations),
        )

    def _tell_s(self, holding: Holding, load: Load) -> float:
        """Return what this rank's collectives take: the bytes on the wire, and a moment for each."""
        speech, shape = holding.speech, holding.seat.shape
        rows = _busiest(holding, load) * shape.expert
        said = speech.of_step(rows * load.tokens, rows)
        parts, others = shape.tensor, shape.tensor * shape.expert - 1
        on_wire = 2 * (parts - 1) / parts * said.reduced + others * said.gathered + said.sent
        on_wire += said.exchanged + (shape.expert - 1) * said.counted
        count = speech.sums + (said.gathered > 0) + (said.sent > 0)
        count += _COLLECTIVES_OF_EXPERTS * speech.expert_layers * (shape.expert > 1)
        return on_wire / (self.device.link * self.assumed.of_link) + count * self.assumed.collective_s

    def _kv_tokens(self, holding: Holding) -> int:
        free = self.device.memory_bytes * self.assumed.of_memory - holding.weight_bytes
        return max(0, int(free // holding.kv_bytes))


def _busiest(holding: Holding, load: Load) -> int:
    """Return the rows of the part that has most of them: a row is never divided."""
    return -(-load.rows // holding.seat.shape.expert)


def _hit(holding: Holding, tokens: int) -> float:
    """Return the share of its experts that a rank has to read: those chosen, any as likely as any other.

    Ranks wait for one another in each layer, and one of them has an expert to read however few the tokens.
    """
    if not holding.num_experts:
        return 0.0
    first, last = holding.experts
    chosen = 1.0 - (1.0 - holding.speech.chosen / holding.num_experts) ** tokens
    return max(chosen, 1 / (last - first))


def _of_experts(holding: Holding, tokens: int) -> float:
    """Return numbers of experts multiplied with all tokens that come to this rank."""
    slots = holding.speech.slots
    return holding.weights.experts * holding.speech.chosen / slots * tokens if slots else 0.0


def _attention_operations(holding: Holding, load: Load) -> float:
    """Return what scores and values of a token take: products with all before it."""
    first, last = holding.layers
    heads = holding.heads.query[1] - holding.heads.query[0]
    seen = load.context - (load.tokens - 1) / 2
    return 2 * heads * holding.head_sizes * seen * (last - first)
