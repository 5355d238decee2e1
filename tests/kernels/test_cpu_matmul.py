"""Products with packed matrices against torch's, over odd shapes and both element types."""

from __future__ import annotations

import pytest
import torch

from conch_kernels.cpu.library import Team, library
from conch_kernels.cpu.native import Matrix, check_sizes
from conch_kernels.cpu.packing import FORMATS, interleave, pack, packed_bytes
from support.products import product_of

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module", params=[1, 2, 3])
def team(request):
    return Team(request.param)


def packed(weight, team):
    room = torch.empty(packed_bytes(*weight.shape, weight.dtype), dtype=torch.uint8)
    pack(weight, room, team)
    return room


def multiply(left, weight, team):
    room = packed(weight, team)
    matrix = Matrix(
        panels=room.data_ptr(), depth=weight.shape[1], columns=weight.shape[0], format=FORMATS[weight.dtype]
    )
    return product_of(left, matrix, team)


def test_structures_are_those_of_the_library():
    check_sizes(library())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 11, 12, 13, 25, 64, 191, 193, 400])
@pytest.mark.parametrize(("columns", "depth"), [(32, 16), (97, 48), (320, 130), (16, 2), (576, 1536)])
def test_product(team, dtype, rows, columns, depth):
    make = torch.Generator().manual_seed(rows * columns + depth)
    left = torch.randn(rows, depth, generator=make).to(dtype)
    weight = torch.randn(columns, depth, generator=make).to(dtype)
    expected = left.double() @ weight.double().T
    found = multiply(left, weight, team)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE[dtype] * depth**0.5)


def test_a_row_does_not_depend_on_its_neighbours(team):
    make = torch.Generator().manual_seed(0)
    left = torch.randn(40, 64, generator=make).bfloat16()
    weight = torch.randn(96, 64, generator=make).bfloat16()
    whole = multiply(left, weight, team)
    for row in (0, 7, 39):
        assert torch.equal(multiply(left[row : row + 1].clone(), weight, team)[0], whole[row])


def test_halves_alternate_in_runs():
    weight = torch.arange(64).reshape(64, 1)
    order = interleave(weight).flatten().tolist()
    assert order[:16] == list(range(16)) and order[16:32] == list(range(32, 48)) and order[32] == 16
