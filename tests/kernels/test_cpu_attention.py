"""The CPU attention kernel against the plain meaning: shapes, dtypes, splits, leftovers, and lesser CPUs."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from conch_kernels import cpu_attention
from conch_kernels.cpu.build import BuildError, build
from conch_kernels.cpu.library import library
from conch_kernels.cpu_attention import paged_attention
from conch_kernels.paged import Scores
from support.attention_case import LESSER_CPUS, ROWS, TOLERANCE, Case

try:
    library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(autouse=True)
def a_team_of_three(monkeypatch):
    """Members that outnumber the cores of a small machine: tasks are claimed in any order."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


HEADS = [(4, 4), (9, 3), (5, 1), (14, 2)]


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 1, 3, 20, 1000])
def test_equals_the_reference(rows, heads, window):
    Case(rows, heads, size=16).check(0.3, window)


@pytest.mark.parametrize("size", [2, 3, 8, 24, 64, 80, 100, 128, 256])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_head_sizes(size, dtype):
    Case(ROWS["mixed"], (6, 2), size, dtype=dtype).check(size**-0.5)


@pytest.mark.parametrize(("size", "value_size"), [(24, 16), (16, 24), (192, 128), (8, 71)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_of_another_head_size(size, value_size, dtype):
    Case(ROWS["mixed"], (4, 4), size, value_size, dtype=dtype).check(0.2)


@pytest.mark.parametrize("block", [1, 4, 5, 20, 32, 48])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_block_sizes(block, window, dtype):
    Case(ROWS["chunks with a past"], (6, 2), 16, block=block, dtype=dtype).check(0.3, window)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", ["mixed", "far apart lengths"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_softcap_and_sinks(dtype, rows, softcap, has_sinks):
    sinks = torch.linspace(-1, 4, 6).to(dtype) if has_sinks else None
    Case(ROWS[rows], (6, 2), 24, dtype=dtype).check(24**-0.5, 5, softcap, sinks)


@pytest.mark.parametrize("heads", [(48, 1), (50, 1), (120, 1)])
def test_more_heads_than_a_tile_has_rows(heads):
    Case([(40, 7), (130, 1)], heads, 16).check(0.3)


@pytest.mark.parametrize("scale", [-0.4, 0.0])
def test_scales_that_turn_the_order_round(scale):
    Case(ROWS["mixed"], (4, 2), 16).check(scale)


def test_large_scores_do_not_overflow():
    case = Case(ROWS["far apart lengths"], (4, 2), 16)
    case.q *= 200
    case.step(True, Scores(1.0))
    ours, meaning = case.step(False, Scores(1.0))
    assert (case.q.abs().amax() * case.k.abs().amax()) > 89  # e to the power of that is past fp32
    torch.testing.assert_close(ours, meaning, atol=1e-3, rtol=1e-3)  # a score of 1,000 is good to 6e-5


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [[(2000, 1)], [(2000, 5), (3, 1)]])
@pytest.mark.parametrize("window", [None, 1500])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_keys_of_long_rows_are_shared_out(dtype, rows, window, has_sinks):
    case = Case(rows, (6, 2), 16, dtype=dtype)
    sinks = torch.linspace(-1, 4, 6) if has_sinks else None
    first = case.check(0.3, window, None, sinks)
    tasks, parts = case.plan.tasks(window)
    assert parts > 2 and tasks >= parts
    again, _ = case.step(False, Scores(0.3, window, None, sinks))
    torch.testing.assert_close(again, first, atol=0, rtol=1e-6 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("length", [200, 1000])
def test_a_row_does_not_depend_on_what_shares_its_step(dtype, length, monkeypatch):
    crowd = Case([(length, 1), *[(300, 1)] * 8, (90, 90)], (9, 3), 16, dtype=dtype)
    together = crowd.check(0.3)[:1]
    alone = Case([(length, 1)], (9, 3), 16, dtype=dtype)
    for name in ("q", "k", "v"):
        setattr(alone, name, getattr(crowd, name)[:length])
    for members in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=members: count)
        assert torch.equal(alone.check(0.3), together)
    assert (alone.plan.tasks(None)[1] > 0) == (length > 256)


def test_keys_before_the_window_are_not_read():
    case = Case([(200, 1)], (2, 1), 16)
    case.step(True, Scores(0.3, 8))
    case.kv[:, case.tables[0, :11].long()] = math.nan
    ours, meaning = case.step(False, Scores(0.3, 8))
    assert not ours.isnan().any()
    torch.testing.assert_close(ours, meaning, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("what", ["q", "k", "v"])
def test_a_broken_row_shows_it_and_breaks_no_other(dtype, what):
    case = Case([(20, 1), (20, 1)], (4, 2), 16, dtype=dtype)
    case.step(True, Scores(0.3))
    getattr(case, what)[19] = math.nan
    ours, meaning = case.step(False, Scores(0.3))
    assert ours[0].isnan().all() and meaning[0].isnan().all()
    torch.testing.assert_close(ours[1], meaning[1], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_inputs_may_lie_anyhow():
    case = Case(ROWS["mixed"], (6, 2), 16)
    case.step(True, Scores(0.3))
    wanted, _ = case.step(False, Scores(0.3))
    for name in ("q", "k", "v"):
        turned = getattr(case, name).permute(1, 2, 0).contiguous().permute(2, 0, 1)
        setattr(case, name, torch.cat([turned, turned], dim=1)[:, : turned.shape[1]])
    ours, _ = case.step(False, Scores(0.3))
    assert torch.equal(ours, wanted)


def test_layers_with_different_windows_share_a_plan():
    case = Case(ROWS["far apart lengths"], (4, 2), 16)
    case.step(True, Scores(0.3))
    case.step(False, Scores(0.3))
    rows = [case.q[:0]]
    for window in (None, 4, None, 9):
        ours, meaning = case.step(False, Scores(0.3, window))
        rows.append(ours)
        torch.testing.assert_close(ours, meaning, atol=2e-5, rtol=2e-5)
    assert not torch.equal(rows[1], rows[2])


def test_compile_sees_through_it():
    case = Case(ROWS["mixed"], (4, 2), 16)
    case.step(True, Scores(0.3))
    wanted, _ = case.step(False, Scores(0.3))
    q, k, v = (torch.cat([part[s:e] for s, e in _present(case)]) for part in (case.q, case.k, case.v))

    def layer(query, plan):
        return paged_attention(query * 2, k, v, case.kv, plan, Scores(0.3)) + 1

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q / 2, case.plan), wanted + 1)


def _present(case):
    for row, start, end in case.spans(past=False):
        begin = sum(case.lengths[:row])
        yield begin + start, begin + end


@pytest.mark.parametrize("flags", LESSER_CPUS.values(), ids=LESSER_CPUS.keys())
def test_lesser_cpus_get_it_right(flags, monkeypatch):
    lesser = ctypes.CDLL(str(build(flags)))
    monkeypatch.setattr(cpu_attention, "library", lambda: lesser)
    for dtype in TOLERANCE:
        for block, window, softcap in ((16, None, None), (5, 7, 2.0)):
            for heads, size in (((9, 3), 64), ((4, 4), 24), ((5, 1), 100)):
                case = Case([(70, 33), (130, 1), (5, 2)], heads, size, block=block, dtype=dtype)
                case.check(size**-0.5, window, softcap)
    long = Case([(2000, 3)], (6, 2), 16)  # in parts
    long.check(0.3)
    assert long.plan.tasks(None)[1] > 0


@pytest.mark.parametrize("size", [12, 16, 64])
def test_a_part_in_which_some_queries_see_nothing(size):
    case = Case([(530, 20)], (4, 2), size, block=4)  # 4 tokens take 16 lanes: a part ends after token 511
    case.check(size**-0.5)
    assert case.plan.tasks(None)[1] > 0  # the first query, at 510, sees none of the last part's keys
