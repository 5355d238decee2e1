"""Row table and batch builder: plain arrays, checked against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conch.api import Admission, Row, SamplingParams
from conch.worker.batch_builder import BatchBuilder
from conch.worker.row_table import RowTable, TokenView, TokenViews

SIZE = 4


def admission(request_id, tokens, **params):
    return Admission(request_id, tuple(tokens), len(tokens), SamplingParams(**params), -1, 64)


def test_rows_are_reused_without_leftovers():
    table = RowTable(2, 32, 8)
    table.admit(admission(7, [1, 2, 3], temperature=0.5, top_k=4, logprobs=2, repetition_penalty=2.0))
    row = table.row_of(7)
    assert table.seeds[row] == 2**64 - 1
    table.forget([7, 99])
    table.admit(admission(8, [5], temperature=0.0))
    assert table.row_of(8) == row
    assert table.num_tokens[row] == 1 and table.top_k[row] == 0 and table.repetition[row] == 1
    assert not (table.is_edited[row] or table.has_logprobs[row] or table.is_random[row])


def test_table_grows():
    table = RowTable(1, 32, 8)
    for request_id in range(5):
        table.admit(admission(request_id, [request_id + 1, 2]))
    rows = [table.row_of(request_id) for request_id in range(5)]
    assert len(set(rows)) == 5 == len(table)
    assert [table.num_tokens[row] for row in rows] == [2] * 5
    assert [table.limits[row] for row in rows] == [64] * 5
    assert [int(table.token_ids[row, 0]) for row in rows] == [1, 2, 3, 4, 5]


def test_tokens_past_the_end_are_dropped():
    table = RowTable(1, 4, 8)
    table.admit(admission(1, [1, 2, 3]))
    table.append(table.row_of(1), [4, 5, 6])
    assert table.num_tokens[table.row_of(1)] == 4


def test_token_view():
    view = TokenView(np.array([5, 6, 7], np.int32))
    assert len(view) == 3 and view[-1] == 7 and view[1:] == [6, 7] and list(view) == [5, 6, 7]
    assert isinstance(view[0], int)


def test_views_show_the_rows_as_they_are_when_looked_at():
    table = RowTable(3, 32, 8)
    for request_id in range(3):
        table.admit(admission(request_id, [request_id + 1, 2]))
    views = TokenViews(table, [table.row_of(2), table.row_of(0)])
    table.append(table.row_of(0), [9])
    assert len(views) == 2
    assert [list(view) for view in views] == [[3, 2], [1, 2, 9]]
    assert [list(view) for view in views[1:]] == [[1, 2, 9]]


@pytest.mark.parametrize(
    ("params", "is_special"),
    [
        ({"temperature": 0.0}, False),
        ({"top_k": 1}, False),
        ({}, True),
        ({"temperature": 0.0, "logprobs": 0}, True),
        ({"temperature": 0.0, "min_tokens": 1}, True),
        ({"temperature": 0.0, "presence_penalty": 0.5}, True),
        ({"temperature": 0.0, "logit_bias": {1: 1.0}}, True),
    ],
)
def test_a_row_that_asks_for_more_than_the_likeliest_is_special(params, is_special):
    table = RowTable(1, 32, 8)
    table.admit(admission(1, [1], **({"temperature": 0.0} if is_special else {"logprobs": 1})))
    table.admit(admission(1, [1], **params))
    assert table.is_special[table.row_of(1)] == is_special


request = st.tuples(st.integers(1, 20), st.integers(0, 19), st.integers(1, 20), st.integers(0, 3))


@given(st.lists(request, min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_builder_equals_a_plain_loop(shapes):
    table = RowTable(2, 64, 16)
    rows, tokens, positions, slots, wanted, decided = [], [], [], [], [], []
    for request_id, (length, start, count, num_drafts) in enumerate(shapes):
        start = min(start, length - 1)
        count = min(count, length - start)
        samples = start + count == length
        drafts = tuple(range(90, 90 + num_drafts)) if samples else ()
        ids = [100 * request_id + index for index in range(length)]
        blocks = tuple(50 * request_id + index for index in range(8))
        table.admit(admission(request_id, ids))
        table.set_blocks(table.row_of(request_id), 0, blocks)
        table.put_drafts(table.row_of(request_id), drafts)
        total = count + len(drafts)
        rows.append(Row(request_id, start, total, samples, drafts, 0, ()))
        known = [*ids, *drafts]
        if samples:
            first = len(tokens) + total - 1 - len(drafts)
            wanted += range(first, first + 1 + len(drafts))
            decided += range(length, length + 1 + len(drafts))
        for position in range(start, start + total):
            tokens.append(known[position])
            positions.append(position)
            slots.append(blocks[position // SIZE] * SIZE + position % SIZE)
    batch, where = BatchBuilder(table, SIZE, torch.device("cpu")).build(rows)
    assert batch.input_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert batch.logit_rows.tolist() == wanted
    assert where.positions.tolist() == decided
    assert batch.cu_query.tolist() == np.cumsum([0] + [row.count for row in rows]).tolist()
    assert batch.seq_lens.tolist() == [row.start + row.count for row in rows]
    assert batch.max_query == max(row.count for row in rows)
    assert batch.max_seq_len == max(row.start + row.count for row in rows)
    assert batch.block_tables.shape == (len(rows), -(-batch.max_seq_len // SIZE))
    types = (batch.input_ids, batch.positions, batch.slot_mapping, batch.logit_rows)
    assert all(tensor.dtype == torch.int64 for tensor in types)
    assert all(part.dtype == torch.int32 for part in (batch.cu_query, batch.seq_lens, batch.block_tables))
