"""From logits to tokens, row by row as each request asks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from conch.api import TokenLogprobs
from conch.model.logits import Logits
from conch.worker.batch_builder import LogitRows
from conch.worker.drawing import DrawSettings, distribution, draw
from conch.worker.logit_edits import edit_logits
from conch.worker.philox import Purpose, uniforms
from conch.worker.row_table import RowTable
from conch.worker.verification import DrawnDraft, decide

I64 = npt.NDArray[np.int64]
NO_DRAWN_DRAFTS: Mapping[int, DrawnDraft] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """A token for each of the L logit rows.

    Attributes
    ----------
    token_ids
        Length L.
    logprobs
        By logit row, for those whose request asks.
    broken
        Logit rows whose largest logit is not finite, with that logit; their tokens mean nothing.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs]
    broken: dict[int, float]


class Sampler:
    """Samples without state: all it needs is in the row table, and the random numbers are functions.

    A batch of greedy requests pays for one pass over the logits, and nothing else.

    Parameters
    ----------
    table
        What is known of the requests.
    eos_token_ids
        Ids that `min_tokens` bans.
    """

    def __init__(self, table: RowTable, eos_token_ids: frozenset[int]) -> None:
        self._table = table
        self._eos_token_ids = eos_token_ids

    def sample(
        self,
        logits: Logits,
        wanted: LogitRows,
        drawn_drafts: Mapping[int, DrawnDraft] = NO_DRAWN_DRAFTS,
    ) -> Sampled:
        """Decide a token for each of the L rows of logits.

        Parameters
        ----------
        drawn_drafts
            By logit row, drafts that were drawn rather than guessed; see `conch.worker.verification`.
        """
        table = self._table
        if not table.is_special[wanted.rows].any():
            return Sampled(logits.likeliest.tolist(), {}, _broken(logits.largest.tolist()))
        final, likeliest, broken = self.edited(logits.values, wanted)
        is_random = table.is_random[wanted.rows].copy()
        is_random[list(drawn_drafts)] = False
        if is_random.any():
            likeliest = self._drawn(final, wanted, np.flatnonzero(is_random), likeliest)
        if drawn_drafts:
            likeliest = self._decided(final, wanted, drawn_drafts, likeliest)
        reporting = np.flatnonzero(table.has_logprobs[wanted.rows])
        logprobs = self._logprobs(logits.values, wanted, reporting, likeliest) if len(reporting) else {}
        return Sampled(likeliest.tolist(), logprobs, broken)

    def edited(
        self, logits: torch.Tensor, wanted: LogitRows
    ) -> tuple[torch.Tensor, torch.Tensor, dict[int, float]]:
        """Change logits as requests ask: returns them, the likeliest token of each row, and broken rows.

        Broken rows are 0 in what is returned.
        """
        table = self._table
        num_output = wanted.positions - table.num_prompt[wanted.rows]
        which = np.flatnonzero(table.is_edited[wanted.rows] | (num_output < table.min_tokens[wanted.rows]))
        final = logits.clone() if len(which) else logits
        for index in which.tolist():
            row, position = int(wanted.rows[index]), int(wanted.positions[index])
            edit_logits(final[index], table, row, position, self._eos_token_ids)
        found = Logits.of(final)
        likeliest = torch.from_numpy(found.likeliest).to(final.device)
        broken = _broken(found.largest.tolist())
        if broken:
            final = final.index_fill(0, torch.tensor(list(broken), device=final.device), 0.0)
        return final, likeliest, broken

    def settings(self, wanted: LogitRows, which: I64, purpose: Purpose, device: torch.device) -> DrawSettings:
        """Return how the rows `which` draw for a purpose."""
        table, rows = self._table, wanted.rows[which]
        numbers = (
            table.temperature[rows],
            table.top_k[rows],
            table.top_p[rows],
            table.min_p[rows],
            uniforms(table.seeds[rows], wanted.positions[which], purpose),
        )
        return DrawSettings(*(torch.from_numpy(each).to(device) for each in numbers))

    def _drawn(
        self, logits: torch.Tensor, wanted: LogitRows, which: I64, likeliest: torch.Tensor
    ) -> torch.Tensor:
        """Return `likeliest` with the rows `which` drawn instead."""
        settings = self.settings(wanted, which, Purpose.DRAW, logits.device)
        if len(which) == len(wanted.rows):
            return draw(logits, settings)
        index = torch.from_numpy(which).to(logits.device)
        return likeliest.index_copy(0, index, draw(logits[index], settings))

    def _decided(
        self,
        logits: torch.Tensor,
        wanted: LogitRows,
        drafts: Mapping[int, DrawnDraft],
        likeliest: torch.Tensor,
    ) -> torch.Tensor:
        """Return `likeliest` with the rows of drawn drafts decided instead."""
        which = np.fromiter(drafts, np.int64)
        index = torch.from_numpy(which).to(logits.device)
        settings = self.settings(wanted, which, Purpose.ACCEPT, logits.device)
        seeds = self._table.seeds[wanted.rows[which]]
        residual = torch.from_numpy(uniforms(seeds, wanted.positions[which], Purpose.RESIDUAL))
        decided = decide(
            distribution(logits[index], settings),
            list(drafts.values()),
            settings.uniform,
            residual.to(logits.device),
        )
        return likeliest.index_copy(0, index, torch.tensor(decided, device=logits.device))

    def _logprobs(
        self,
        logits: torch.Tensor,
        wanted: LogitRows,
        which: npt.NDArray[np.int64],
        token_ids: torch.Tensor,
    ) -> dict[int, TokenLogprobs]:
        """Report the model's own distribution, before penalties, temperature and filters."""
        index = torch.from_numpy(which).to(logits.device)
        raw, chosen = logits[index], token_ids[index][:, None]
        values = torch.log_softmax(raw, dim=1)
        taken = values.gather(1, chosen).squeeze(1).tolist()
        ranks = ((raw > raw.gather(1, chosen)).sum(dim=1) + 1).tolist()
        counts = self._table.num_logprobs[wanted.rows[which]].tolist()
        tops = values.topk(min(max(counts), values.shape[1]), dim=1)
        top_ids, top_values = tops.indices.tolist(), tops.values.tolist()
        chosen_ids = chosen.squeeze(1).tolist()
        return {
            int(at): TokenLogprobs(
                chosen_ids[i],
                taken[i],
                ranks[i],
                tuple(zip(top_ids[i][: counts[i]], top_values[i][: counts[i]], strict=True)),
            )
            for i, at in enumerate(which)
        }


def _broken(best: list[float]) -> dict[int, float]:
    """Return the rows whose largest logit is not finite."""
    return {index: value for index, value in enumerate(best) if not math.isfinite(value)}
