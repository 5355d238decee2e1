"""Text that a model writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conch.api.config import EngineConfig
from conch.api.sampling import SamplingParams
from conch.engine.local import LocalEngine


@dataclass(frozen=True, slots=True)
class Text:
    """A question and its answer: `token_ids` are of both, the first `num_prompt` of the question."""

    token_ids: tuple[int, ...]
    num_prompt: int


def write_texts(
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    progress: Callable[[float], None],
) -> list[Text]:
    """Let the model answer greedily, as many at a time as `config` says, whatever is not too long.

    Parameters
    ----------
    config
        The model.
    prompts
        Token ids of each.
    max_tokens
        Of an answer.
    progress
        Told the share that is done.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    answers: dict[int, list[int]] = {}
    asked: dict[int, Sequence[int]] = {}
    done = 0
    with LocalEngine(config) as engine:
        waiting = deque(p for p in prompts if len(p) + max_tokens <= engine.info.max_model_len)
        total = max(1, len(waiting))
        while waiting or engine.has_work:
            while waiting and len(asked) - done < config.max_num_seqs:
                request_id = engine.add(waiting[0], params)
                asked[request_id], answers[request_id] = waiting.popleft(), []
            for output in engine.step():
                answers[output.request_id].extend(output.token_ids)
                if output.finish_reason is not None or output.failure is not None:
                    done += 1
                    progress(done / total)
    return [Text((*asked[key], *answers[key]), len(asked[key])) for key in sorted(asked) if answers[key]]
