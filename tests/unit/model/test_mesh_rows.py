"""Rows divided among parts: every block that a part reads is there, and steps of some rows are steps."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from conch.api import Arena, Move, StepBatch
from conch.model.mesh.rows import Holders, take_rows

SIZE = 4


class Story:
    """Requests that grow, share beginnings, and are parked, and what each part really has of their blocks."""

    def __init__(self, parts):
        self.parts = parts
        self.holders = Holders(parts, SIZE)
        self.requests = []
        self._content = {}  # (part, block): which write it holds
        self._truth = {}  # block: the last write
        self._free = list(range(500))

    def begin(self, parent=None):
        """Begin a request, with the whole blocks of another one."""
        blocks, length = self.requests[parent] if parent is not None else ([], 0)
        whole = length // SIZE
        self.requests.append((blocks[:whole], whole * SIZE))

    def park(self, index):
        """Carry a request's last block away and back."""
        blocks, length = self.requests[index]
        if not blocks:
            return
        source, target = blocks[-1], self._free.pop()
        there = Move(source, 7, Arena.DEVICE, Arena.SWAP)
        self.holders.follow([there, Move(7, target, Arena.SWAP, Arena.DEVICE)])
        for part in range(self.parts):
            self._content[part, target] = self._content.get((part, source))
        self._truth[target] = self._truth[source]
        self.requests[index] = ([*blocks[:-1], target], length)

    def step(self, counts):
        """Let each request compute some tokens, and check that who reads a block has it."""
        rows = []
        for index, ((blocks, start), count) in enumerate(zip(self.requests, counts, strict=True)):
            missing = -(-(start + count) // SIZE) - len(blocks)
            blocks = [*blocks, *(self._free.pop() for _ in range(missing))]
            self.requests[index] = (blocks, start + count)
            rows.append((start, start + count, blocks))
        width = max(len(blocks) for _, _, blocks in rows)
        tables = np.array([[*blocks, *[0] * (width - len(blocks))] for _, _, blocks in rows])
        starts, ends = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
        lots = self.holders.divide(starts, ends, tables)
        for block, source, _ in lots.fetches:
            assert self._content[source, block] == self._truth[block], "who sends it has it"
        for block, source, to in lots.fetches:
            assert source != to
            self._content[to, block] = self._truth[block]
        for (start, _, blocks), part in zip(rows, lots.part_of_row, strict=True):
            for block in blocks[: -(-start // SIZE)]:
                assert self._content[part, block] == self._truth[block], "who reads it has it"
        for (start, _, blocks), part in zip(rows, lots.part_of_row, strict=True):
            for block in blocks[start // SIZE :]:
                self._content[part, block] = self._truth[block] = object()


@given(st.data())
def test_parts_have_what_their_rows_read(data):
    story = Story(data.draw(st.integers(1, 4)))
    story.begin()
    for _ in range(data.draw(st.integers(1, 12))):
        index = data.draw(st.integers(0, len(story.requests) - 1))
        act = data.draw(st.sampled_from(["begin", "share", "park", "step", "step"]))
        if act == "park":
            story.park(index)
        elif act != "step":
            story.begin(index if act == "share" else None)
        story.step([data.draw(st.integers(1, 9)) for _ in story.requests])


def test_rows_spread_and_stay():
    holders = Holders(2, SIZE)
    tables = np.arange(8 * 3).reshape(8, 3)
    first = holders.divide(np.zeros(8, np.int64), np.full(8, 9), tables)
    assert np.bincount(first.part_of_row).tolist() == [4, 4]
    again = holders.divide(np.full(8, 9), np.full(8, 10), tables)
    assert again.part_of_row.tolist() == first.part_of_row.tolist()
    assert again.fetches == ()


def test_a_shared_beginning_does_not_send_all_rows_to_one_part():
    holders = Holders(2, SIZE)
    shared = np.array([[0, 1]])
    holders.divide(np.array([0]), np.array([8]), shared)
    tables = np.array([[0, 1, 2 + row] for row in range(10)])
    lots = holders.divide(np.full(10, 8), np.full(10, 9), tables)
    assert 4 <= np.bincount(lots.part_of_row)[1] <= 6
    assert lots.fetches == ((0, 0, 1), (1, 0, 1)), "each shared block goes once"


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=6), st.data())
def test_a_step_of_some_rows(rows, data):
    counts = [count for count, _ in rows]
    cu_query = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    logits = [
        token
        for index, (count, wanted) in enumerate(rows)
        for token in range(cu_query[index + 1] - min(count, wanted), cu_query[index + 1])
    ]
    total = int(cu_query[-1])
    batch = StepBatch(
        input_ids=torch.arange(total),
        positions=torch.arange(total) + 100,
        cu_query=torch.from_numpy(cu_query),
        seq_lens=torch.tensor([10 * count for count in counts], dtype=torch.int32),
        block_tables=torch.arange(len(rows) * 2, dtype=torch.int32).view(-1, 2),
        slot_mapping=torch.arange(total) + 200,
        logit_rows=torch.tensor(logits, dtype=torch.int64),
        max_query=max(counts),
        max_seq_len=10 * max(counts),
    )
    chosen = data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1))
    taken = take_rows(batch, np.array(sorted(chosen)))
    ids = taken.input_ids.tolist()
    assert ids == [token for row in sorted(chosen) for token in range(cu_query[row], cu_query[row + 1])]
    assert taken.positions.tolist() == [token + 100 for token in ids]
    assert taken.slot_mapping.tolist() == [token + 200 for token in ids]
    assert taken.cu_query.diff().tolist() == [counts[row] for row in sorted(chosen)]
    assert [ids[row] for row in taken.logit_rows] == [token for token in logits if token in ids]
    assert taken.block_tables.tolist() == [[2 * row, 2 * row + 1] for row in sorted(chosen)]
    assert taken.max_query == max(counts[row] for row in chosen)
