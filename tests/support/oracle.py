"""The truth: transformers in fp32 with eager attention, one sequence at a time."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

NEAR_TIE = 1e-3
MAX_NEAR_TIE_SHARE = 0.02


class Oracle:
    """One checkpoint, loaded by transformers itself."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
        self._gaps: dict[tuple[tuple[int, ...], int], list[tuple[int, float]]] = {}
        self._greedy: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def logits(self, token_ids: list[int], keep: int = 0) -> torch.Tensor:
        """Return the logits after each token, or the last `keep`: float32 [T, V], without any cache."""
        ids = torch.tensor([token_ids])
        with torch.inference_mode():
            return self.model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits[0].float()

    def gaps(self, prompt: list[int], answer: list[int]) -> list[tuple[int, float]]:
        """For each token of an answer: the likeliest token there, and by how much its logit is larger."""
        key = ((*prompt, *answer), len(prompt))
        if key not in self._gaps:
            logits = self.logits([*prompt, *answer], keep=len(answer) + 1)[:-1]
            best, likeliest = logits.max(dim=1)
            chosen = logits.gather(1, torch.tensor(answer)[:, None]).squeeze(1)
            self._gaps[key] = list(zip(likeliest.tolist(), (best - chosen).tolist(), strict=True))
        return self._gaps[key]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """REF(p, n): the likeliest continuation of `count` tokens, not stopping at EOS."""
        key = (tuple(prompt), count)
        if key not in self._greedy:
            cache, ids, tokens = None, torch.tensor([prompt]), []
            with torch.inference_mode(), warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", FutureWarning
                )  # `past_key_values` has a new name in some versions
                for _ in range(count):
                    output = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
                    cache = output.past_key_values
                    tokens.append(int(output.logits[0, -1].argmax()))
                    ids = torch.tensor([tokens[-1:]])
            self._greedy[key] = tokens
        return self._greedy[key]


@dataclass
class Same:
    """SAME(a, b), counted over a whole test: call `check` for each answer, `finish` at the end.

    An answer is right when each token is the likeliest of the oracle after the tokens before it, or nearer
    than `NEAR_TIE` to it. That is stricter than comparing with REF up to the first near tie: it goes on.
    """

    oracle: Oracle
    positions: int = 0
    near_ties: int = 0

    def check(self, prompt: list[int], answer: list[int]) -> None:
        """Fail at the first token that is neither the likeliest nor nearly so."""
        if not answer:
            return
        for index, (likeliest, gap) in enumerate(self.oracle.gaps(prompt, answer)):
            if answer[index] != likeliest:
                assert gap < NEAR_TIE, (
                    f"token {index} of {len(answer)} after a prompt of {len(prompt)} is {answer[index]}, "
                    f"not {likeliest}; gap {gap:.2g}"
                )
                self.near_ties += 1
        self.positions += len(answer)

    def check_all(
        self, prompts: Sequence[Sequence[int]], budgets: Sequence[int], answers: Sequence[Sequence[int]]
    ) -> None:
        """Check answers that are as long as their budgets, and finish."""
        for prompt, budget, answer in zip(prompts, budgets, answers, strict=True):
            assert len(answer) == budget
            self.check(list(prompt), list(answer))
        self.finish()

    def finish(self) -> None:
        """Fail when nothing was checked or too much was left to near ties."""
        assert self.positions > 0
        assert self.near_ties <= MAX_NEAR_TIE_SHARE * self.positions, (
            f"{self.near_ties} near ties in {self.positions} tokens"
        )
