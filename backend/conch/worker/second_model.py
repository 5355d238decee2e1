"""A second model in the worker, for drafters: its KV lies under the target's block numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch

from conch.api import AttentionKernel, ConfigError, EngineConfig, ModelSpec, PluginError, Row, Span
from conch.model.attention import PagedStep
from conch.model.choosing import load_model
from conch.worker.batch_builder import BatchBuilder
from conch.worker.draft_draws import DraftDraws
from conch.worker.draft_pool import DraftPool
from conch.worker.prepare import Prepared, prepare
from conch.worker.row_table import RowTable
from conch.worker.scratch import ScratchBlocks

Progress = Callable[[str, float], None]


def prepare_draft_model(config: EngineConfig, target: ModelSpec, progress: Progress) -> Prepared:
    """Find and understand the draft model of a configuration.

    Raises
    ------
    CheckpointError
        It is missing, or cannot be served.
    ConfigError
        No model is named, or its vocabulary is not the target's.
    """
    settings = config.speculative_config
    if settings is None or settings.model is None:
        raise ConfigError("this drafter needs speculative_config.model")
    own = msgspec.structs.replace(
        config,
        model=settings.model,
        quantization=settings.quantization,
        max_model_len=settings.max_model_len,
        speculative_config=None,
    )
    prepared = prepare(own, progress)
    if prepared.spec.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model {settings.model!r} has a vocabulary of {prepared.spec.vocab_size} tokens and "
            f"the target one of {target.vocab_size}: they must be the same"
        )
    reach, seen = prepared.spec.attention.reach, target.attention.reach
    if seen is not None and (reach is None or reach > seen):
        raise ConfigError(
            f"the draft model {settings.model!r} looks further back than the target, whose KV is given up "
            "where it falls behind the window of every layer"
        )
    return prepared


class SecondModel(DraftPool):
    """`conch.api.DraftModel`, over the worker's own row table.

    Parameters
    ----------
    prepared
        The model.
    kernel
        Its attention.
    table, draws
        What is known of the requests, and where drafts are drawn.
    target
        The model that it drafts for.
    progress
        Told how far loading has come.

    Raises
    ------
    PluginError
        The kernel cannot serve the model.
    """

    def __init__(
        self,
        prepared: Prepared,
        kernel: AttentionKernel,
        table: RowTable,
        draws: DraftDraws,
        target: Prepared,
        progress: Progress,
    ) -> None:
        config, settings = prepared.config, target.config.speculative_config
        assert settings is not None, "there is a draft model because it says so"
        reasons = kernel.unfit(prepared.spec.attention)
        if reasons:
            raise PluginError(f"attention kernel for the draft model: {'; '.join(reasons)}")
        scratch = ScratchBlocks(table, config.block_size, config.max_num_seqs, settings.num_tokens)
        super().__init__(prepared.spec, kernel, scratch)
        self._config = config
        self._draws = draws
        self._builder = BatchBuilder(table, config.block_size, torch.device(prepared.spec.attention.device))
        self._max_model_len = min(prepared.spec.max_model_len, target.spec.max_model_len)
        self._reach = target.spec.attention.reach
        self._model = load_model(prepared.description, config, kernel, progress)

    @property
    def max_model_len(self) -> int:
        """Tokens that it can see."""
        return self._max_model_len

    @property
    def max_num_tokens(self) -> int:
        """Tokens that one call of `logits` should have at most."""
        return self._config.max_num_batched_tokens

    def begin(self, rows: Sequence[Row]) -> None:
        """Begin the drafting of a step: the target has just computed `rows`."""
        self._scratch.begin()

    def keep_up(self, spans: Sequence[Span]) -> None:
        """Have nothing to do after a step without drafts: what is missing is computed when it is needed."""

    def settle(self) -> None:
        """Have nothing to finish."""

    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Compute rows and their KV; returns the logits of those that sample: float32 [L, V]."""
        with self._scratch.lent(rows):
            batch, _ = self._builder.build(rows)
        step = PagedStep(self._kernel, self._kernel.plan(batch), self._pools)
        return self._model.logits(batch, step).values

    def first_held(self, start: int) -> int:
        """Return the first token whose block a request still has in a step that begins at `start`."""
        return 0 if self._reach is None else max(0, start - self._reach + 1)

    def draw(self, request_ids: Sequence[int], logits: torch.Tensor) -> list[int | None]:
        """Draw the next draft of each request as its own settings say."""
        return self._draws.draw(request_ids, logits)

    def close(self) -> None:
        """Free the device."""
        self._pools = []
        del self._model
