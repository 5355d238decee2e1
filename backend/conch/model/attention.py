"""Our attention inside transformers' models.

transformers hands every attention layer's query, key and value to a function that is registered by name.
Ours passes them on to the object that the caller of ``forward`` gave as keyword argument `STEP_KEYWORD`: a
real step (`PagedStep`) or one that only looks (`conch.model.describe`). Nothing is ambient: two models may
run at once.

The name is deliberately not registered in transformers' mask interface: for a name without a mask function it
builds no mask, and does not look at the positions either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from conch.api import AttentionKernel, AttentionLayer, StepBatch

IMPLEMENTATION = "conch"
STEP_KEYWORD = "conch_step"


class Step(Protocol):
    """What stands behind the attention of one forward pass."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        constants: Mapping[str, Any],
    ) -> torch.Tensor:
        """Attend: query [T, H, D], key [T, K, D], value [T, K, Dv]; returns [T, H, Dv]."""


class PagedStep:
    """Runs a paged attention kernel with what it planned for this step.

    Parameters
    ----------
    kernel
        The kernel.
    plan
        What its `plan` returned.
    pools
        KV pool of each layer.
    """

    __slots__ = ("_kernel", "plan", "pools")

    def __init__(
        self,
        kernel: AttentionKernel,
        plan: Any,  # noqa: ANN401 - the kernel's own
        pools: Sequence[torch.Tensor],
    ) -> None:
        self._kernel = kernel
        self.plan = plan
        self.pools = pools

    def over(self, batch: StepBatch) -> PagedStep:
        """Return the same over other rows."""
        return PagedStep(self._kernel, self._kernel.plan(batch), self.pools)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        constants: Mapping[str, Any],
    ) -> torch.Tensor:
        """Write key and value to the layer's pool and attend."""
        index: int = module.layer_idx  # type: ignore[assignment]
        return self.attend_layer(index, (query, key, value), constants)

    def attend_layer(
        self,
        index: int,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        constants: Mapping[str, Any],
    ) -> torch.Tensor:
        """Attend in a layer by its number: query, key and value."""
        query, key, value = heads
        scale = constants.get("scaling")
        layer = AttentionLayer(
            index,
            self.pools[index],
            query.shape[-1] ** -0.5 if scale is None else scale,
            constants.get("sliding_window"),
            constants.get("softcap"),
            constants.get("s_aux"),
        )
        return self._kernel.run(query, key, value, layer, self.plan)


def register_attention() -> None:
    """Make transformers know our name; safe to repeat."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _attention)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **constants: Any,  # noqa: ANN401 - whatever the layer passes
) -> tuple[torch.Tensor, None]:
    """Bridge the layouts: query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H, D]."""
    step: Step = constants[STEP_KEYWORD]
    constants["attention_mask"] = attention_mask
    rows = step.attend(
        module,
        query.squeeze(0).transpose(0, 1),
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        constants,
    )
    return rows.unsqueeze(0), None
