"""Packing of quantised sub-landmarks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanroll.kernels.landmarks import pack, packed_bytes, unpack


def test_the_worked_example() -> None:
    keys = torch.zeros(8, 16)
    keys[0, [0, 1, 15]] = torch.tensor([6.0, -7.0, 3.0])
    keys[1, [0, 1, 15]] = torch.tensor([8.0, -7.0, 4.0])
    packed = pack(keys, num_rows=4, bits=4)
    assert packed.shape == (packed_bytes(4, 16, bits=4),) == (40,)
    assert packed[:8].tolist() == [0x07, 0x09, 0, 0, 0, 0, 0, 0x40]
    assert packed[32:].tolist() == [0x80, 0x3F, 0, 0, 0, 0, 0, 0]
    assert packed[8:32].count_nonzero() == 0
    assert unpack(packed, 4, 16, bits=4)[0].tolist() == [7, -7, *[0] * 13, 4]


def test_bytes_of_int8() -> None:
    keys = torch.zeros(8, 10)
    keys[6:, 9] = -127.0
    keys[6:, 8] = 2.0
    packed = pack(keys, num_rows=4, bits=8)
    # Two tiles of 8 dimensions; dimensions 8 and 9 of row 3 are in the second, behind the first tile's 32 bytes.
    assert packed.shape == (4 * (2 * 8 + 2),)
    assert packed.nonzero()[:, 0].tolist() == [32 + 24, 32 + 25, 64 + 6, 64 + 7]
    assert packed[56:58].tolist() == [2, 0x81]
    assert torch.equal(unpack(packed, 4, 10, bits=8)[3], keys[7])


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.sampled_from((4, 8, 16)), st.sampled_from((1, 2, 8)), st.integers(1, 40)),
    bits=st.sampled_from((4, 8)),
    exponent=st.integers(-35, 37),
    seed=st.integers(0, 2**16),
)
def test_rows_are_means_to_the_nearest_step(
    shape: tuple[int, int, int, int], bits: int, exponent: int, seed: int
) -> None:
    pages, num_rows, run, dim = shape
    keys = torch.randn(pages, num_rows * run, dim, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    means = keys.double().view(pages, num_rows, run, dim).mean(2)
    actual = unpack(pack(keys, num_rows, bits), num_rows, dim, bits).double()
    step = means.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    # Rounding the scale to 8 bits moves the largest of 127 codes by half a step at most. Too small to scale: zeros.
    near = (actual - means).abs() <= 0.51 * step
    assert (near | (actual == 0) & (step < 1.01e-30)).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_nan_is_not_hidden(bits: int) -> None:
    keys = torch.ones(8, 16)
    keys[3, 5] = torch.nan
    rows = unpack(pack(keys, 4, bits), 4, 16, bits)
    assert rows.isnan().any(-1).tolist() == [False, True, False, False]
