"""What the machine allows: floors of time from operations and bytes, and the rates they are divided by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from peers.workloads import Work


@dataclass(frozen=True)
class Rates:
    """Measured in the same run.

    Attributes
    ----------
    bytes_per_s
        Reading memory with all threads.
    operations_per_s
        Of a large bf16 matrix product.
    """

    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True)
class ModelSize:
    """What a step of the model costs at least; see `programs/prepare_weights.py`.

    Attributes
    ----------
    linear_parameters
        In the layers' matrices.
    head_parameters
        In the output head, whether tied or not.
    weight_bytes
        Read by every step, by weights: layers and head.
    kv_bytes_per_token
        Of a 16-bit KV cache, all layers.
    attention_width
        Query heads x head size x layers: an attended position costs four operations for each.
    """

    linear_parameters: int
    head_parameters: int
    weight_bytes: dict[str, int]
    kv_bytes_per_token: int
    attention_width: int

    def prefill_operations(self, start: int, count: int) -> int:
        """Return the operations for `count` prompt tokens after `start` cached ones, and one row of head."""
        attended = count * start + count * (count + 1) // 2
        return 2 * self.linear_parameters * count + 4 * self.attention_width * attended + self.decode_head(1)

    def decode_head(self, rows: int) -> int:
        """Return the operations of the head for `rows` tokens."""
        return 2 * self.head_parameters * rows

    def decode_operations(self, lengths: list[int]) -> int:
        """Return the operations of one decode step over requests that hold `lengths` tokens."""
        attention = 4 * self.attention_width * sum(lengths)
        return 2 * self.linear_parameters * len(lengths) + attention + self.decode_head(len(lengths))

    def decode_bytes(self, weights: str, lengths: list[int]) -> int:
        """Return the bytes that this step reads: all weights once, and the KV of each request."""
        return self.weight_bytes[weights] + self.kv_bytes_per_token * sum(lengths)


Floor = Callable[[ModelSize, Rates, Work], float]


def decode_floor_s(size: ModelSize, rates: Rates, weights: str, lengths: list[int], steps: int) -> float:
    """Return the least time of `steps` decode steps: each waits for memory or for arithmetic."""
    total = 0.0
    for step in range(steps):
        held = [length + step + 1 for length in lengths]
        memory_s = size.decode_bytes(weights, held) / rates.bytes_per_s
        total += max(memory_s, size.decode_operations(held) / rates.operations_per_s)
    return total


def floor_figure(key: str, weights: str, work: Work, size: ModelSize, rates: Rates) -> float | None:
    """Return a workload's figure (see `Workload.figure`) at the limits; None where no floor is defined.

    The rate of arithmetic is that of bf16. Quantised weights may be computed in another type, so for them
    only one stream, which waits for memory, has a floor.
    """
    lengths = [len(prompt) for prompt in work.prompts]
    if key == "w1":
        steps = work.max_tokens - 1
        return steps / decode_floor_s(size, rates, weights, lengths, steps)
    if weights != "16bit" or key == "w5":  # copying may be speculated about: fewer steps than tokens
        return None
    cached = len(work.before[0]) - 32 if work.before else 0
    prefill = sum(size.prefill_operations(cached, length - cached) for length in lengths)
    prefill_s = prefill / rates.operations_per_s
    if key == "w3":
        return sum(lengths) / prefill_s
    seconds = prefill_s + decode_floor_s(size, rates, weights, lengths, work.max_tokens - 1)
    return seconds if key == "w4" else len(lengths) * work.max_tokens / seconds


def floor_fraction(measured: float, floor: float, smaller_is_better: bool) -> float:
    """Return how near a figure is to its limit; 1 is at the limit."""
    return floor / measured if smaller_is_better else measured / floor
