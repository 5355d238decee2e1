"""What a worker remembers of each request: one row of plain arrays, from admission to the end.

Everything that a step needs is gathered from here with numpy. Nothing else is remembered: the sampler derives
its counts from the token ids, so a preempted request loses nothing that its next admission does not bring.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from conch.api import Admission, SamplingParams, StepPlan

_U64 = 1 << 64
_MOST = 1 << 40  # stands for any larger number, which would not fit an array


class RowTable:
    """Arrays with a row for each request. The worker is the only writer.

    Parameters
    ----------
    num_rows
        Requests expected at once; grows when there are more.
    max_tokens
        Tokens that a row may hold.
    max_blocks
        Blocks that a row may hold.

    Attributes
    ----------
    token_ids : int32 [rows, max_tokens]
    num_tokens, limits, num_blocks : list of int
        `limits` are the most tokens that each request will ever have, `num_blocks` the length of its block
        table. Read and written row by row, which takes lists a fraction of the time that it takes arrays.
    num_prompt : int64 [rows]
    block_tables : int32 [rows, max_blocks]
    seeds : uint64 [rows]
    temperature, top_p, min_p, repetition, presence, frequency : float64 [rows]
    top_k, min_tokens, num_logprobs : int64 [rows]
        `top_k` 0 keeps all.
    is_random, is_edited, has_logprobs : bool [rows]
        Whether a token is drawn rather than the likeliest taken; whether penalties or bias change logits
        before that; whether log-probabilities are reported.
    is_special : bool [rows]
        Whether any of these holds, or `min_tokens` do: whether more is asked for than the likeliest token.
    """

    def __init__(self, num_rows: int, max_tokens: int, max_blocks: int) -> None:
        self._rows: dict[int, int] = {}
        self._free = list(range(num_rows - 1, -1, -1))
        self.params: list[SamplingParams] = [SamplingParams()] * num_rows
        self.token_ids = np.zeros((num_rows, max_tokens), np.int32)
        self.num_tokens = [0] * num_rows
        self.limits = [0] * num_rows
        self.num_blocks = [0] * num_rows
        self.num_prompt = np.zeros(num_rows, np.int64)
        self.block_tables = np.zeros((num_rows, max_blocks), np.int32)
        self.seeds = np.zeros(num_rows, np.uint64)
        self.temperature = np.ones(num_rows)
        self.top_k = np.zeros(num_rows, np.int64)
        self.top_p = np.ones(num_rows)
        self.min_p = np.zeros(num_rows)
        self.repetition = np.ones(num_rows)
        self.presence = np.zeros(num_rows)
        self.frequency = np.zeros(num_rows)
        self.min_tokens = np.zeros(num_rows, np.int64)
        self.num_logprobs = np.zeros(num_rows, np.int64)
        self.is_random = np.zeros(num_rows, bool)
        self.is_edited = np.zeros(num_rows, bool)
        self.has_logprobs = np.zeros(num_rows, bool)
        self.is_special = np.zeros(num_rows, bool)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._rows

    def row_of(self, request_id: int) -> int:
        """Row of a request that was admitted."""
        return self._rows[request_id]

    def learn(self, plan: StepPlan) -> tuple[int, ...]:
        """Bring all rows up to date with a plan; returns the ids of those that are gone."""
        gone = (*plan.preempted, *plan.finished)
        if gone:
            self.forget(gone)
        for admission in plan.admitted:
            self.admit(admission)
        for row in plan.rows:
            if row.blocks:
                self.set_blocks(self.row_of(row.request_id), row.blocks_from, row.blocks)
            if row.drafts:
                self.put_drafts(self.row_of(row.request_id), row.drafts)
        return gone

    def admit(self, admission: Admission) -> None:
        """Give a request a row; one of the same id is replaced."""
        self.forget((admission.request_id,))
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._rows[admission.request_id] = row
        count = len(admission.token_ids)
        self.token_ids[row, :count] = admission.token_ids
        self.num_tokens[row] = count
        self.num_blocks[row] = 0
        self.num_prompt[row] = admission.num_prompt
        self.limits[row] = admission.limit
        self.seeds[row] = admission.seed % _U64
        self._set_params(row, admission.params)

    def _set_params(self, row: int, params: SamplingParams) -> None:
        self.params[row] = params
        self.temperature[row] = params.temperature
        self.top_k[row] = min(max(params.top_k, 0), _MOST)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.repetition[row] = params.repetition_penalty
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.min_tokens[row] = min(params.min_tokens, _MOST)
        self.has_logprobs[row] = params.logprobs is not None
        self.num_logprobs[row] = params.logprobs or 0
        leaves_one = params.top_k == 1 or params.top_p == 0 or params.min_p == 1
        self.is_random[row] = not (params.is_greedy or leaves_one)
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self.is_edited[row] = penalties != (1, 0, 0) or bool(params.logit_bias)
        flags = (self.is_random[row], self.is_edited[row], self.has_logprobs[row], params.min_tokens > 0)
        self.is_special[row] = any(flags)

    def forget(self, request_ids: Iterable[int]) -> None:
        """Free the rows of requests; unknown ids are ignored."""
        for request_id in request_ids:
            row = self._rows.pop(request_id, None)
            if row is not None:
                self._free.append(row)

    def set_blocks(self, row: int, start: int, blocks: Sequence[int]) -> None:
        """Change a row's block table from entry `start` to its end."""
        end = start + len(blocks)
        self.block_tables[row, start:end] = blocks
        self.num_blocks[row] = end

    def set_scratch(self, row: int, blocks: Sequence[int]) -> None:
        """Lend entries after the end of a row's block table to blocks that are nobody's."""
        start = self.num_blocks[row]
        self.block_tables[row, start : start + len(blocks)] = blocks

    def put_drafts(self, row: int, drafts: Sequence[int]) -> None:
        """Write guesses after the known tokens, where they count for nothing until `append`."""
        start = self.num_tokens[row]
        self.token_ids[row, start : start + len(drafts)] = drafts

    def append(self, row: int, token_ids: Sequence[int]) -> None:
        """Add tokens that the engine will take to be part of the request.

        Those past the row's end are dropped: they are past every limit, so the engine drops them too.
        """
        start = self.num_tokens[row]
        end = min(start + len(token_ids), self.token_ids.shape[1])
        for at, token_id in zip(range(start, end), token_ids):  # noqa: B905 - the end is cut off
            self.token_ids[row, at] = token_id
        self.num_tokens[row] = end

    def _grow(self) -> None:
        """Double the rows."""
        old = len(self.params)
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                setattr(self, name, np.concatenate([value, np.zeros_like(value)]))
        self.params += self.params
        self.num_tokens += [0] * old
        self.limits += [0] * old
        self.num_blocks += [0] * old
        self._free = list(range(2 * old - 1, old - 1, -1))


class TokenViews(Sequence["TokenView"]):
    """The tokens of some rows, of which nothing is touched until somebody looks."""

    __slots__ = ("_rows", "_table")

    def __init__(self, table: RowTable, rows: Sequence[int]) -> None:
        self._table = table
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204 - int or slice
        if isinstance(index, slice):
            return TokenViews(self._table, self._rows[index])
        row = self._rows[index]
        return TokenView(self._table.token_ids[row, : self._table.num_tokens[row]])


class TokenView(Sequence[int]):
    """The tokens of a row, read-only and without a copy until one is asked for."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: npt.NDArray[np.int32]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204 - int or slice
        return self._tokens[index].tolist()

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[np.int32]:
        return self._tokens if dtype is None else self._tokens.astype(dtype, copy=bool(copy))
