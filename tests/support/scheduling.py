"""Simulations of a scheduler, and what happened in them, counted in steps."""

from __future__ import annotations

from conch.testing import Simulation, make_context
from conch.testing.simulation import expected


def simulate(scheduler, num_blocks=64, num_drafts=0, step_seconds=None, **settings) -> Simulation:
    """Return a simulation; `scheduler` is called with the context and a clock of simulated seconds."""
    context = make_context(num_blocks=num_blocks, **settings)
    simulation = None
    made = scheduler(context, lambda: 0.0 if simulation is None else simulation.now_s)
    simulation = Simulation(made, context, num_drafts)
    if step_seconds is not None:
        simulation.step_seconds = step_seconds
    return simulation


def steps_to_first_token(simulation, request, most=2000) -> int:
    """Step until a request has its first token; returns how many steps that took."""
    for step in range(1, most):
        assert simulation.step() is not None
        if request.num_tokens > request.num_prompt:
            return step
    raise AssertionError("no first token")


def counts(plan):
    """Return the tokens of each row."""
    return {row.request_id: row.count for row in plan.rows}


def check_answers(simulation) -> None:
    """Fail unless everyone who ended has the right tokens, and nothing is left."""
    simulation.check_idle()
    for request in simulation.ended:
        prompt, output = request.token_ids[: request.num_prompt], request.token_ids[request.num_prompt :]
        assert output == expected(
            prompt, request.limit - request.num_prompt, request.seed, request.cache_salt
        )
