"""Philox against the published answers, and the draws it makes."""

from __future__ import annotations

import numpy as np
import pytest

from conch.worker.philox import philox4x32, uniforms

# From the known-answer file of Random123, for philox4x32 with 10 rounds: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter, key, result):
    words = philox4x32(np.array([counter], np.uint64).T, np.array([key], np.uint64).T)
    assert tuple(words[:, 0].tolist()) == result


def test_rows_do_not_shift_each_other():
    seeds = np.array([3, 2**64 - 1, 3, 7], np.uint64)
    positions = np.array([0, 5, 1, 2**33], np.int64)
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_uniform_over_positions_and_over_seeds():
    many = np.arange(200_000)
    for seeds, positions in ((np.full_like(many, 42), many), (many, np.full_like(many, 42))):
        drawn = uniforms(seeds.astype(np.uint64), positions)
        assert drawn.min() >= 0 and drawn.max() < 1
        counts, _ = np.histogram(drawn, bins=100, range=(0, 1))
        chi_square = ((counts - 2000) ** 2 / 2000).sum()
        assert 40 < chi_square < 180  # 99 degrees of freedom
        assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.01
