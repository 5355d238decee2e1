"""Plays chats on the engine without a model, beside a cache that never forgets.

Options: none. Question: ``{"settings": {... model.json ...}, "chats": N, "at_once": M, "seed": S}``; the
answer holds prompt tokens, those that the engine's prefix cache gave, and those that the oracle would have
given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from chat_trace import Chat, Turn, chats
from lines import serve
from modelless import build_modelless, sampled
from oracle_cache import ROOT, OracleCache

from conch.api import StepPlan
from conch.api.sampling import SamplingParams
from conch.engine.core import Engine
from conch.engine.protocol import AddRequest


class Witness:
    """Sees every plan: what was found at a first admission, and what could have been.

    The oracle knows what earlier steps have computed, no more: what is computed in the very step can be found
    by nobody.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._oracle = OracleCache()
        self._tokens: dict[int, list[int]] = {}
        self._ends: dict[int, tuple[int, int]] = {}
        self.sums = {"requests": 0, "prompt": 0, "found": 0, "oracle": 0, "oracle_in_blocks": 0}

    def see(self, plan: StepPlan) -> None:
        """Take note of a step."""
        for admission in plan.admitted:
            if admission.request_id not in self._tokens:
                self._count(admission.token_ids, plan.cached.get(admission.request_id, 0))
            self._tokens[admission.request_id] = list(admission.token_ids)
        for row in plan.rows:
            tokens, end = self._tokens[row.request_id], row.start + row.count
            known, node = self._ends.get(row.request_id, (0, ROOT))
            if end > known:  # less where a preempted request is computed again
                self._ends[row.request_id] = end, self._oracle.insert(tokens[known:end], node)
            tokens += sampled(row)

    def _count(self, tokens: tuple[int, ...], found: int) -> None:
        best = self._oracle.longest(tokens[:-1])  # the last one is computed always, for its logits
        self.sums["requests"] += 1
        self.sums["prompt"] += len(tokens)
        self.sums["found"] += found
        self.sums["oracle"] += best
        self.sums["oracle_in_blocks"] += best - best % self._block_size


class Talk:
    """One chat under way."""

    def __init__(self, chat: Chat) -> None:
        self._turns: Iterator[Turn] = iter(chat.turns)
        self.tokens = list(chat.system_tokens)

    def next_turn(self) -> Turn | None:
        """Let the user speak; None when all is said."""
        turn = next(self._turns, None)
        if turn is not None:
            self.tokens += turn.user_tokens
        return turn


class Stage:
    """Keeps a number of chats going at once; steps are its clock."""

    def __init__(self, engine: Engine, waiting: list[Chat], at_once: int) -> None:
        self._engine = engine
        self._waiting = deque(waiting)
        self._at_once = at_once
        self._thinking: list[tuple[int, Talk, Turn]] = []
        self._answering: dict[int, Talk] = {}
        self._step = self._last_id = 0

    def play(self) -> None:
        """Play all chats to their end."""
        while self._waiting or self._thinking or self._answering:
            while self._waiting and len(self._thinking) + len(self._answering) < self._at_once:
                self._think(Talk(self._waiting.popleft()))
            self._send([entry for entry in self._thinking if entry[0] <= self._step])
            self._hear()
            self._step += 1

    def _think(self, talk: Talk) -> None:
        turn = talk.next_turn()
        if turn is not None:
            self._thinking.append((self._step + turn.thinking_steps, talk, turn))

    def _send(self, ready: list[tuple[int, Talk, Turn]]) -> None:
        for entry in ready:
            self._thinking.remove(entry)
            _, talk, turn = entry
            self._last_id += 1
            self._answering[self._last_id] = talk
            params = SamplingParams(temperature=0.0, max_tokens=turn.answer_tokens, ignore_eos=True)
            self._engine.add(
                AddRequest(request_id=self._last_id, token_ids=tuple(talk.tokens), params=params)
            )

    def _hear(self) -> None:
        for output in self._engine.step():
            if output.failure is not None:
                raise RuntimeError(f"a request failed: {output.failure.message}")
            talk = self._answering[output.request_id]
            talk.tokens += output.token_ids
            if output.finish_reason is not None:
                self._think(self._answering.pop(output.request_id))


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Play one trace on an engine of its own."""
    settings = question["settings"]
    witness = Witness(settings["block_size"])
    engine, _ = build_modelless(settings, witness.see)
    Stage(engine, chats(question["chats"], question["seed"]), question["at_once"]).play()
    stats = engine.stats()
    if stats.prefix_hits != witness.sums["found"]:
        raise RuntimeError(f"the engine counts {stats.prefix_hits} hits, its plans {witness.sums['found']}")
    return {**witness.sums, "steps": stats.steps, "preemptions": stats.preemptions}


if __name__ == "__main__":
    serve(lambda _: ({}, answer))
