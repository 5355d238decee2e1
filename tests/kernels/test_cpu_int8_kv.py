"""int8 KV in the CPU attention kernel: what is kept, what is computed from it, how far off that may be."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from conch_kernels import cpu_attention
from conch_kernels.cpu.build import BuildError, build
from conch_kernels.cpu.library import library
from conch_kernels.cpu_attention import KvLayout
from conch_kernels.paged import Scores
from support.attention_case import LESSER_CPUS, ROWS, TOLERANCE, Case, Int8Case

HALF = 0.5 / 127
"""Half a step between two numbers, as a share of the largest element."""

try:
    library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(autouse=True)
def a_team_of_three(monkeypatch):
    """Members that outnumber the cores of a small machine: tasks are claimed in any order."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (5, 1)])
@pytest.mark.parametrize("window", [None, 3, 20])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_computes_with_what_it_keeps(rows, heads, window, dtype):
    Int8Case(rows, heads, 16, dtype=dtype).check(0.3, window)


@pytest.mark.parametrize(
    ("size", "value_size"), [(3, 3), (24, 24), (64, 64), (100, 100), (256, 256), (8, 71)]
)
@pytest.mark.parametrize("block", [4, 5, 16, 32])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_head_and_block_sizes(size, value_size, block, dtype):
    Int8Case(ROWS["mixed"], (6, 2), size, value_size, block, dtype).check(size**-0.5, 7, 2.0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [[(2000, 1)], [(2000, 5), (3, 1)], [(530, 20)]])
def test_keys_of_long_rows_are_shared_out(rows, dtype):
    case = Int8Case(rows, (6, 2), 16, block=4 if rows[0] == (530, 20) else 16, dtype=dtype)
    case.check(0.3, None, None, torch.linspace(-1, 4, 6))
    assert case.plan.tasks(None)[1] > 2


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [3, 64, 100])
def test_is_within_half_a_step_of_what_it_was_given(size, dtype):
    case = Int8Case([(40, 40)], (4, 2), size, dtype=dtype)
    case.k[5], case.v[6], case.k[7, 0] = 0, 1e-30, 1e30
    case.v[8] = 1e-38  # its scale has no inverse
    case.step(False, Scores(0.0))
    slots = case.tables[0, torch.arange(40) // 16].long() * 16 + torch.arange(40) % 16
    for given, kept in zip((case.k, case.v), case.kept(slots, case.k, case.v), strict=True):
        given = given.float()
        largest = given.abs().amax(dim=-1, keepdim=True)
        assert ((kept - given).abs() <= HALF * largest * 1.0001 + 1e-36).all()
        assert not torch.equal(kept, given)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scale", [0.05, 0.3])
@pytest.mark.parametrize("rows", ["mixed", "far apart lengths"])
def test_is_off_by_no_more_than_it_may(rows, scale, dtype):
    """The bound: keys off by half a step put scores off by e, values by half a step of theirs.

    A score is scale times the product of a query and a key, so e is at most scale times the sum of a query's
    absolute elements times half a step. Weights are then off by factors between exp(-2 e) and exp(2 e), and
    together by at most exp(2 e) - 1; what they weigh is at most the largest value.
    """
    case, exact = (kind(ROWS[rows], (6, 2), 32, dtype=dtype) for kind in (Int8Case, Case))
    for one in (case, exact):
        one.step(True, Scores(scale))
    ours, wanted = (one.step(False, Scores(scale))[side] for one, side in ((case, 0), (exact, 1)))
    queries, keys, values = (part.float().abs() for part in (case.q, case.k, case.v))
    off = scale * float(queries.sum(dim=-1).max() * keys.max()) * HALF
    allowed = math.expm1(2 * off) * float(values.max()) + HALF * float(values.max())
    error = float((ours.float() - wanted.float()).abs().max())
    tolerance = TOLERANCE[dtype]
    assert error <= allowed + tolerance * (1 + float(wanted.float().abs().max()))
    assert dtype is torch.bfloat16 or error > 10 * tolerance  # it is int8 that is measured


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("what", ["q", "k", "v"])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_row_shows_it_and_breaks_no_other(dtype, what, broken):
    case, healthy = (Int8Case([(20, 1), (20, 1)], (4, 2), 16, dtype=dtype) for _ in range(2))
    for one in (case, healthy):
        one.step(True, Scores(0.3))
    getattr(case, what)[19, :, 3] = broken
    ours, wanted = (one.step(False, Scores(0.3))[0] for one in (case, healthy))
    assert ours[0].isnan().all() and not ours[1].isnan().any()
    assert torch.equal(ours[1], wanted[1])


@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_memory_is_half_and_a_scale(size):
    narrow, wide = (KvLayout(3, size, size, 16, is_int8).pool_shape(1) for is_int8 in (True, False))
    per_token = 2 * (size + 4)
    assert math.prod(narrow) == 3 * 16 * per_token
    assert math.prod(narrow) * 2 == math.prod(wide) * 2 * (1 + 4 / size)


@pytest.mark.parametrize("flags", LESSER_CPUS.values(), ids=LESSER_CPUS.keys())
def test_lesser_cpus_get_it_right(flags, monkeypatch):
    lesser = ctypes.CDLL(str(build(flags)))
    monkeypatch.setattr(cpu_attention, "library", lambda: lesser)
    for dtype in TOLERANCE:
        for block, heads, size in ((16, (9, 3), 64), (5, (5, 1), 100), (4, (4, 4), 24)):
            Int8Case([(70, 33), (130, 1), (5, 2)], heads, size, block=block, dtype=dtype).check(size**-0.5, 7)
