"""What the target's layers hold while it reads its own text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conch.training.texts import Text

_TOKENS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """A text, and the states of the target at each of its tokens.

    Attributes
    ----------
    token_ids : int64 [S]
    states : bf16 [S, A * h]
        Of the A layers asked for, side by side. The last is the output of the last layer, before its norm.
    num_prompt
        Tokens that the target has not written.
    """

    token_ids: torch.Tensor
    states: torch.Tensor
    num_prompt: int


class Target:
    """The model that the head drafts for, as training needs it.

    Parameters
    ----------
    folder
        Its checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.module: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, local_files_only=True
        )
        self.module.eval().requires_grad_(False)
        self.config = self.module.config

    @property
    def embedding(self) -> torch.Tensor:
        """bf16 [V, h]."""
        weight: torch.Tensor = self.module.model.embed_tokens.weight.detach()
        return weight

    @property
    def head(self) -> torch.Tensor:
        """bf16 [V, h]."""
        weight: torch.Tensor = self.module.lm_head.weight.detach()
        return weight

    def last_norm(self, states: torch.Tensor) -> torch.Tensor:
        """Normalise outputs of the last layer."""
        normed: torch.Tensor = self.module.model.norm(states)
        return normed

    def lessons(
        self, texts: Sequence[Text], layers: Sequence[int], progress: Callable[[float], None]
    ) -> list[Lesson]:
        """Read texts, and keep what goes into `layers`; one past the last is what comes out of that."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index].token_ids))
        lessons = []
        at = 0
        while at < len(order):
            longest = len(texts[order[at]].token_ids) * 1.2 + 8
            group = order[at : at + max(1, int(_TOKENS_AT_ONCE / longest))]
            at += len(group)
            lessons += self._read([texts[index] for index in group], layers)
            progress(at / len(order))
        return lessons

    def _read(self, texts: Sequence[Text], layers: Sequence[int]) -> list[Lesson]:
        width = max(len(text.token_ids) for text in texts)
        ids = torch.zeros(len(texts), width, dtype=torch.long)
        for row, text in enumerate(texts):
            ids[row, : len(text.token_ids)] = torch.tensor(text.token_ids)
        found: dict[int, torch.Tensor] = {}
        model = self.module.model
        parts = [*model.layers, model.norm]
        hooks = [
            parts[index].register_forward_pre_hook(
                lambda _, args, kwargs, index=index: found.__setitem__(
                    index, args[0] if args else kwargs["hidden_states"]
                ),
                with_kwargs=True,
            )
            for index in layers
        ]
        try:
            with torch.inference_mode():
                model(input_ids=ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        states = torch.cat([found[index] for index in layers], dim=-1)
        return [
            Lesson(
                ids[row, : len(text.token_ids)].clone(),
                states[row, : len(text.token_ids)].clone(),
                text.num_prompt,
            )
            for row, text in enumerate(texts)
        ]
