"""Counts what ranks of a mesh tell each other while they compute steps, beside what the formula says."""

from __future__ import annotations

import random
from typing import Any

from lines import serve

from conch.api import Admission, EngineConfig, Row, SamplingParams, StepPlan
from conch.api.mesh import RankOrder
from conch.engine.environment import settle_environment

BLOCK_SIZE = 16
TOKENS = range(3, 256)
"""That requests are made of: many, so that a router has something to divide."""


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Settle what all topologies have in common."""
    settle_environment()  # before anything imports torch
    from conch.testing.threaded_mesh import ThreadedMesh

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        """Serve some requests on a mesh; returns bytes of all ranks together, by kind."""
        requests, prompt, outputs = asked["requests"], asked["prompt"], asked["outputs"]
        config = EngineConfig(
            dtype="float32",
            block_size=BLOCK_SIZE,
            max_num_seqs=requests,
            max_num_batched_tokens=requests * prompt,
            num_gpu_blocks_override=requests * blocks_for(prompt + outputs),
            **asked["settings"],
        )
        orders = list(orders_of(requests, prompt, outputs))
        with ThreadedMesh(config) as mesh:
            before = mesh.said()
            for order in orders:
                mesh.execute(order)
            counted = [after - begun for after, begun in zip(mesh.said(), before, strict=True)]
            formula = mesh.predicted([order.plan for order in orders])
        return {"counted": totals(counted), "formula": totals(formula), "ranks": mesh.shape.size}

    return {}, answer


def orders_of(requests: int, prompt: int, outputs: int) -> list[RankOrder]:
    """Return steps that compute prompts of so many tokens, all at once, and then decode; of random tokens."""
    draw, each = random.Random(1), blocks_for(prompt + outputs)
    params = SamplingParams(temperature=0.0, max_tokens=outputs)
    admitted = tuple(
        Admission(number, tuple(draw.choices(TOKENS, k=prompt)), prompt, params, 0, prompt + outputs)
        for number in range(requests)
    )
    blocks = [tuple(range(number * each, (number + 1) * each)) for number in range(requests)]
    rows = tuple(Row(number, 0, prompt, True, (), 0, blocks[number]) for number in range(requests))
    orders = [RankOrder(StepPlan(rows, admitted))]
    for done in range(outputs - 1):
        learned = tuple((number, (draw.choice(TOKENS),)) for number in range(requests))
        rows = tuple(Row(number, prompt + done, 1, True, (), each, ()) for number in range(requests))
        orders.append(RankOrder(StepPlan(rows), learned))
    return orders


def blocks_for(tokens: int) -> int:
    """Return how many blocks hold so many tokens."""
    return -(-tokens // BLOCK_SIZE)


def totals(traffic: list[Any]) -> dict[str, float]:
    """Add up all ranks."""
    kinds = ("reduced", "gathered", "sent", "exchanged", "counted")
    return {kind: sum(getattr(one, kind) for one in traffic) for kind in kinds}


if __name__ == "__main__":
    serve(start)
