"""Steps that do nothing for anyone, but touch every weight and pay what only the first step pays."""

from __future__ import annotations

from conch.api import Admission, EngineConfig, Row, SamplingParams, StepPlan

_ID = 0


def warm_up_plans(config: EngineConfig, limit: int) -> tuple[StepPlan, ...]:
    """Return a full step and a decode, and the end of their request.

    Parameters
    ----------
    limit
        Tokens that one request may have.
    """
    count = max(1, min(config.max_num_batched_tokens, limit - 1))
    blocks = tuple(range(-(-min(count + 1, limit) // config.block_size)))
    admission = Admission(_ID, (0,) * count, count, SamplingParams(temperature=0.0, max_tokens=2), 0, limit)
    full = StepPlan(rows=(Row(_ID, 0, count, True, (), 0, blocks),), admitted=(admission,))
    end = StepPlan(rows=(), finished=(_ID,))
    if limit <= count:
        return full, end
    decode = StepPlan(rows=(Row(_ID, count, 1, True, (), 0, ()),))
    return full, decode, end
