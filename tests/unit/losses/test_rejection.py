"""Rejection by ratio: by hand, against a naive search, and what may not matter."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanroll.errors import ConfigError
from leanroll.losses.rejection import RatioLimits, reject

RATIOS = torch.tensor([2.0, 0.5, 1.0, 1.2, 1.2, 0.1, 1.0, 6.0, 0.9])
IDS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 3])  # geometric means 1, 1.2, 0.316, 2.32; products 1, 1.44, 0.1, 5.4


def judge(mask=None, **limits):
    return reject(RATIOS.log(), IDS, 4, RatioLimits(**limits), mask=mask)


@pytest.mark.parametrize(
    ("limits", "by_mean", "by_token"),
    [
        ({}, [], []),
        ({"geo_high": 1.19}, [1, 3], []),
        ({"geo_high": 1.21}, [3], []),
        ({"geo_low": 0.3}, [], []),
        ({"geo_low": 0.32}, [2], []),
        ({"veto_high": 2.1}, [], [3]),
        ({"veto_high": 1.9}, [], [0, 3]),
        ({"veto_low": 0.2}, [], [2]),
        ({"geo_high": 1.1, "veto_low": 0.2, "veto_high": 3.0}, [1, 3], [2, 3]),
    ],
    ids=str,
)
def test_sequences_by_hand(limits, by_mean, by_token):
    found = judge(**limits)
    assert found.by_mean.nonzero()[:, 0].tolist() == by_mean
    assert found.by_token.nonzero()[:, 0].tolist() == by_token
    assert found.sequences.nonzero()[:, 0].tolist() == sorted({*by_mean, *by_token})
    assert not found.outliers.any()


def test_the_mean_is_normalised_by_length_where_the_product_is_not():
    """The same mismatch per token: a product bound rejects whatever is long, the geometric mean treats all lengths alike."""
    lengths = torch.tensor([4, 400])
    ids = torch.arange(2).repeat_interleave(lengths)
    log_ratio = torch.full((404,), math.log(1.01))
    products = torch.zeros(2).index_add_(0, ids, log_ratio).exp()
    assert products[0] < 3.0 < products[1]
    assert not reject(log_ratio, ids, 2, RatioLimits(geo_high=1.011)).sequences.any()
    assert reject(log_ratio, ids, 2, RatioLimits(geo_high=1.009)).sequences.all()


def test_masked_tokens_count_nowhere():
    mask = torch.tensor([True, True, True, True, True, False, False, False, True])
    found = judge(mask=mask, geo_low=0.5, geo_high=1.1, veto_high=3.0, m2=1e-9)
    assert found.by_mean.tolist() == [False, True, False, False], "sequence 2 has no token left, sequence 3 one of 0.9"
    assert not found.by_token.any()
    assert found.outliers.nonzero()[:, 0].tolist() == [0, 1, 8], "the 1.0 of sequence 0 stays"
    assert found.m2_before == pytest.approx((2 * math.log(2) ** 2 + math.log(0.9) ** 2) / 4)
    assert found.m2_after == 0.0


def test_outliers_are_sought_in_what_is_left():
    found = judge(veto_high=3.0, m2=0.2)
    squares = {i: math.log(RATIOS[i]) ** 2 for i in range(7)}
    assert found.m2_before == pytest.approx(sum(squares.values()) / 7, rel=1e-6)
    assert found.outliers.nonzero()[:, 0].tolist() == [5], "0.1; the 6.0 is gone with its sequence"
    assert found.m2_after == pytest.approx(sum(v for i, v in squares.items() if i != 5) / 6, rel=1e-6)


def test_of_equals_the_last_goes_and_none_may_be_left():
    log_ratio, ids = torch.full((4,), 0.5), torch.tensor([0, 0, 1, 1])
    assert reject(log_ratio, ids, 2, RatioLimits(m2=0.25)).outliers.tolist() == [False] * 4, (
        "the bound itself is within"
    )
    found = reject(log_ratio, ids, 2, RatioLimits(m2=0.24))
    assert found.outliers.all()
    assert found.m2_after is None
    mixed = torch.tensor([0.0, 0.5, 0.5, 0.5])
    assert reject(mixed, ids, 2, RatioLimits(m2=0.13)).outliers.tolist() == [False, False, True, True]
    empty = reject(torch.zeros(0), torch.zeros(0, dtype=torch.long), 3, RatioLimits(geo_high=1.1, m2=0.1))
    assert empty.m2_before is None
    assert empty.sequences.tolist() == [False] * 3


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=7), st.floats(1e-3, 4))
def test_as_few_as_possible_go(log_ratios, bound):
    """Against all subsets: no larger set of tokens meets the bound."""
    values = torch.tensor(log_ratios, dtype=torch.float64)
    found = reject(values, torch.zeros(len(values), dtype=torch.long), 1, RatioLimits(m2=bound))
    squares = [v**2 for v in values.tolist()]
    sizes = [
        n
        for n in range(1, len(squares) + 1)
        if min(sum(c) for c in itertools.combinations(squares, n)) / n <= bound * (1 + 1e-12)
    ]
    assert int((~found.outliers).sum()) == max(sizes, default=0)
    kept = [s for s, out in zip(squares, found.outliers.tolist(), strict=True) if not out]
    gone = [s for s, out in zip(squares, found.outliers.tolist(), strict=True) if out]
    assert not kept or not gone or max(kept) <= min(gone)


@given(st.permutations(range(4)))
def test_the_order_of_sequences_does_not_matter(order):
    """Nor does what is packed beside them."""
    limits = RatioLimits(geo_high=1.19, veto_low=0.2, m2=0.3)
    log_ratio = torch.cat([RATIOS.log()[s == IDS] for s in order])
    ids = torch.cat([torch.full((int((s == IDS).sum()),), i) for i, s in enumerate(order)])
    straight, shuffled = reject(RATIOS.log(), IDS, 4, limits), reject(log_ratio, ids, 4, limits)
    assert shuffled.sequences.tolist() == straight.sequences[list(order)].tolist()
    outliers = torch.cat([straight.outliers[s == IDS] for s in order])
    assert shuffled.outliers.tolist() == outliers.tolist()


def test_bad_limits():
    for name, value in (("geo_low", 1.0), ("geo_high", 1.0), ("veto_low", 0.0), ("veto_high", 0.5), ("m2", 0.0)):
        with pytest.raises(ConfigError, match=f"{name} is {value}"):
            RatioLimits(**{name: value})
    with pytest.raises(ConfigError, match="m2 is nan"):
        RatioLimits(m2=float("nan"))
    assert not RatioLimits().active
    assert RatioLimits(m2=0.04).active
