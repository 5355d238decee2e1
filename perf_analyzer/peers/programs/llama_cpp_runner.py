"""llama.cpp's batch API, as its server drives it. Options: ``{"model", "threads"}``.

Each request is a sequence of one context; every step computes what all of them are owed, at most
`BATCH_TOKENS`, decodes first. The next token is the largest logit, taken by numpy. A request alone and a
crowd have a context each: one over all sequences would have each attend past the others' KV.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, field
from typing import Any

import llama_cpp as llama
import numpy as np
from lines import serve

BATCH_TOKENS = 2048
ALONE_TOKENS = 4096
CROWD_TOKENS = 1024
CROWD = 32


@dataclass
class Sequence:
    """A request: what is still to be computed, and what was made."""

    index: int
    owed: list[int]
    computed: int = 0
    made: list[int] = field(default_factory=list)


class Context:
    """A context of a model and one batch that is filled anew for each step.

    Parameters
    ----------
    sequences
        That it holds at most.
    tokens
        That each of them may have.
    """

    def __init__(self, model: Any, threads: int, sequences: int, tokens: int) -> None:  # noqa: ANN401
        params = llama.llama_context_default_params()
        params.n_ctx = sequences * tokens
        params.n_batch = BATCH_TOKENS
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = False
        params.no_perf = True
        self._context = llama.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)

    def clear(self) -> None:
        """Forget all sequences."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), False)

    def step(self, sequences: list[Sequence]) -> list[tuple[Sequence, int]]:
        """Compute some of what is owed; return the next token of each sequence that is owed no more."""
        wanted: list[tuple[Sequence, int]] = []
        count = 0
        for sequence in sorted(sequences, key=lambda one: len(one.owed)):
            part = sequence.owed[: BATCH_TOKENS - count]
            for token in part:
                self._put(count, token, sequence)
                count += 1
            del sequence.owed[: len(part)]
            if part and not sequence.owed:
                self._batch.logits[count - 1] = 1
                wanted.append((sequence, count - 1))
            if count == BATCH_TOKENS:
                break
        self._batch.n_tokens = count
        status = llama.llama_decode(self._context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        return [(sequence, self._largest(place)) for sequence, place in wanted]

    def _put(self, place: int, token: int, sequence: Sequence) -> None:
        batch = self._batch
        batch.token[place] = token
        batch.pos[place] = sequence.computed
        batch.n_seq_id[place] = 1
        batch.seq_id[place][0] = sequence.index
        batch.logits[place] = 0
        sequence.computed += 1

    def _largest(self, place: int) -> int:
        address = ctypes.cast(
            llama.llama_get_logits_ith(self._context, place), ctypes.POINTER(ctypes.c_float)
        )
        return int(np.ctypeslib.as_array(address, shape=(self._vocab_size,)).argmax())


def run(context: Context, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Serve all prompts at once and say when the first token came."""
    began = time.perf_counter()
    context.clear()
    sequences = [Sequence(index, list(prompt)) for index, prompt in enumerate(prompts)]
    running, first_s = list(sequences), None
    while running:
        for sequence, token in context.step(running):
            sequence.made.append(token)
            sequence.owed.append(token)
        if first_s is None and any(sequence.made for sequence in sequences):
            first_s = time.perf_counter() - began
        running = [sequence for sequence in running if len(sequence.made) < max_tokens]
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "first_s": first_s, "token_ids": [one.made for one in sequences]}


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Load the model."""
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(options["model"].encode(), llama.llama_model_default_params())
    alone = Context(model, options["threads"], 1, ALONE_TOKENS)
    crowd = Context(model, options["threads"], CROWD, CROWD_TOKENS)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        prompts = question["prompts"]
        return run(alone if len(prompts) == 1 else crowd, prompts, question["max_tokens"])

    return {"system": llama.llama_print_system_info().decode()}, answer


if __name__ == "__main__":
    serve(start)
