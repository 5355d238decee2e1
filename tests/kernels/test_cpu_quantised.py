"""Weights in groups of 32: what is packed, what a product with them gives, and what a column of them says."""

from __future__ import annotations

import ctypes

import pytest
import torch

from conch_kernels.cpu.build import build
from conch_kernels.cpu.library import Team, library
from conch_kernels.cpu.native import Matrix
from conch_kernels.cpu.quantising import U4, U4M, U8, blocks_of, dequantise, quantise, repack
from support.products import product_of

LAYOUTS = pytest.mark.parametrize("layout", [U8, U4, U4M], ids=lambda layout: layout.kind)


@pytest.fixture(scope="module", params=[1, 2, 3])
def team(request):
    return Team(request.param)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix_of(panels, layout, columns, depth):
    return Matrix(panels=panels.data_ptr(), depth=depth, columns=columns, format=layout.number)


def multiply(left, panels, layout, columns, team, native=None):
    return product_of(left, matrix_of(panels, layout, columns, left.shape[1]), team, native)


def rounded(left):
    """Return rows as the product sees them: whole numbers up to 127 in groups of 32, rounded as it rounds."""
    groups = left.float().unflatten(1, (-1, 32))
    peak = groups.abs().amax(dim=2, keepdim=True)
    numbers = (groups * torch.where(peak == 0, 0, torch.full_like(peak, 127) / peak)).round()
    return (numbers.double() * peak.double() / 127).flatten(1)


def assert_product(found, left, weight):
    """Compare with exact sums of the rounded rows, and from afar with those of the rows as they were."""
    exact = rounded(left) @ weight.double().T
    size = left.double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1)
    assert ((found - exact).abs() / size).max() < 1e-6
    whole = left.double() @ weight.double().T
    assert ((found - whole).norm() / whole.norm()) < 2e-2


@LAYOUTS
def test_blocks_are_those_of_gguf(layout):
    gguf = pytest.importorskip("gguf")
    weight = random(40, 96)
    weight[3, 32:64] = 0
    kind = gguf.GGMLQuantizationType[layout.kind]
    blocks = blocks_of(weight, layout)
    assert torch.equal(blocks, torch.from_numpy(gguf.quantize(weight.numpy(), kind)))
    panels = repack(blocks, layout)
    assert panels.shape == (2, layout.panel_bytes(96))
    assert torch.equal(
        dequantise(panels, layout, 40), torch.from_numpy(gguf.dequantize(blocks.numpy(), kind))
    )


@LAYOUTS
def test_quantised_is_near(layout):
    weight = random(64, 256).bfloat16()
    found = dequantise(quantise(weight, layout), layout, 64)
    step = 1 / 127 if layout.bits == 8 else 1 / 7
    assert (found - weight.float()).abs().max() <= 0.6 * step * weight.float().abs().max()
    assert torch.equal(dequantise(quantise(found, layout), layout, 64), found) or layout is not U8


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 12, 13, 31, 32, 33, 65, 191, 193, 400])
@pytest.mark.parametrize(("columns", "depth"), [(32, 32), (97, 96), (320, 544)])
def test_product(team, layout, dtype, rows, columns, depth):
    left = random(rows, depth, seed=rows).to(dtype)
    panels = quantise(random(columns, depth, seed=columns), layout)
    found = multiply(left, panels, layout, columns, team)
    assert_product(found, left, dequantise(panels, layout, columns))


@LAYOUTS
def test_a_large_number_spoils_only_its_group(layout):
    team = Team(2)
    left = random(4, 128)
    left[:, 40] = 1000
    weight = random(64, 128, seed=1)
    weight[:, 32:64] = 0  # so that what is left is the product of the other groups
    panels = quantise(weight, layout)
    kept = left.clone()
    kept[:, 32:64] = 0
    assert_product(multiply(left, panels, layout, 64, team), kept, dequantise(panels, layout, 64))


@LAYOUTS
def test_a_row_does_not_depend_on_its_neighbours(team, layout):
    left = random(70, 96)
    panels = quantise(random(64, 96, seed=1), layout)
    whole = multiply(left, panels, layout, 64, team)
    for row in (0, 31, 32, 69):
        assert torch.equal(multiply(left[row : row + 1].clone(), panels, layout, 64, team)[0], whole[row])


@LAYOUTS
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_stays_visible(layout, value):
    left = random(3, 64)
    left[1, 40] = value
    found = multiply(left, quantise(random(32, 64, seed=1), layout), layout, 32, Team(2))
    assert not found[1].isfinite().any()
    assert found[[0, 2]].isfinite().all()


@LAYOUTS
def test_rows_of_zeros(layout):
    left = torch.zeros(2, 64)
    found = multiply(left, quantise(random(32, 64), layout), layout, 32, Team(2))
    assert torch.equal(found, torch.zeros(2, 32))


@LAYOUTS
def test_a_column(layout):
    panels = quantise(random(97, 96), layout)
    weight = dequantise(panels, layout, 97)
    matrix = matrix_of(panels, layout, 97, 96)
    found = torch.empty(96)
    for column in (0, 15, 16, 63, 96):
        library().conch_gather_column(ctypes.byref(matrix), column, ctypes.c_void_p(found.data_ptr()))
        torch.testing.assert_close(found, weight[column], rtol=0, atol=1e-6)


@pytest.mark.parametrize("flags", [("-mno-avx512f",), ("-march=x86-64",)], ids=["avx2", "plain"])
def test_lesser_cpus_compute_the_same(flags):
    lesser = ctypes.CDLL(str(build(flags)))
    team = Team(2, lesser)
    for layout in (U8, U4, U4M):
        left = random(35, 96)
        panels = quantise(random(70, 96, seed=1), layout)
        found = multiply(left, panels, layout, 70, team, lesser)
        assert_product(found, left, dequantise(panels, layout, 70))
