"""vLLM on a CPU. Options: ``{"model", "dtype", "max_model_len"}``; ``"speculative_config"`` if it drafts."""

from __future__ import annotations

import itertools
import time
from typing import Any

from lines import serve
from vllm import LLM, SamplingParams


def run(llm: LLM, names: itertools.count[int], prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Serve all prompts at once, step by step, and say when the first token came."""
    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    made: dict[str, list[int]] = {}
    for prompt in prompts:
        name = str(next(names))
        made[name] = []
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    first_s = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            if first_s is None:
                first_s = time.perf_counter() - began
            made[output.request_id] = list(output.outputs[0].token_ids)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "first_s": first_s, "token_ids": list(made.values())}


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Load and compile the model."""
    llm = LLM(
        model=options["model"],
        dtype=options["dtype"],
        max_model_len=options["max_model_len"],
        speculative_config=options.get("speculative_config"),
    )
    names = itertools.count()
    return {}, lambda question: run(llm, names, question["prompts"], question["max_tokens"])


if __name__ == "__main__":
    serve(start)
