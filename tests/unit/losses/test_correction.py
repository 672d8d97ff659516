"""Importance weights by hand, and what is reported about them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leanroll.errors import ConfigError
from leanroll.losses.correction import correction

RATIOS = torch.tensor([1.0, 4.0, 0.5, 2.0, 2.0, 0.1])
IDS = torch.tensor([0, 0, 0, 1, 1, 2])  # sequence ratios 2, 4, 0.1


def weights(mode, ratios=RATIOS, ids=IDS, **options):
    sampler = torch.randn(len(ratios), generator=torch.Generator().manual_seed(0))
    return correction(sampler + ratios.log(), sampler, ids, mode, **options)


@pytest.mark.parametrize(
    ("mode", "floor", "expected", "clipped"),
    [
        ("token_truncate", None, [1.0, 3.0, 0.5, 2.0, 2.0, 0.1], [1]),
        ("token_truncate", 0.2, [1.0, 3.0, 0.5, 2.0, 2.0, 0.2], [1, 5]),
        ("token_mask", None, [1.0, 0.0, 0.5, 2.0, 2.0, 0.1], [1]),
        ("token_mask", 0.2, [1.0, 0.0, 0.5, 2.0, 2.0, 0.0], [1, 5]),
        ("sequence_truncate", None, [2.0, 2.0, 2.0, 3.0, 3.0, 0.1], [3, 4]),
        ("sequence_mask", None, [2.0, 2.0, 2.0, 0.0, 0.0, 0.1], [3, 4]),
        ("sequence_mask", 0.2, [2.0, 2.0, 2.0, 0.0, 0.0, 0.0], [3, 4, 5]),
    ],
)
def test_modes_by_hand(mode, floor, expected, clipped):
    result = weights(mode, cap=3.0, floor=floor)
    assert result.weights.tolist() == pytest.approx(expected, rel=1e-5)
    assert result.clipped.nonzero()[:, 0].tolist() == clipped


def test_off_gives_no_weights_and_still_reports():
    result = weights("off", cap=3.0)
    assert result.weights is None
    assert result.clipped.nonzero()[:, 0].tolist() == [1]


def test_masked_tokens_count_nowhere():
    mask = torch.tensor([True, False, True, True, True, False])
    result = weights("sequence_truncate", cap=3.0, mask=mask)
    assert result.weights[:5].tolist() == pytest.approx([0.5, 0.5, 0.5, 3.0, 3.0], rel=1e-5)
    assert result.clipped[:5].tolist() == [False, False, False, True, True]


def test_weights_carry_no_gradient():
    old = torch.zeros(3, requires_grad=True)
    result = correction(old, torch.ones(3), torch.tensor([0, 0, 1]), "token_truncate")
    assert not result.weights.requires_grad


@given(st.permutations(range(6)), st.sampled_from(["token_truncate", "sequence_truncate", "sequence_mask"]))
def test_order_and_labels_of_samples_do_not_matter(order, mode):
    order = torch.tensor(order)
    sampler = torch.zeros(6)
    straight = correction(RATIOS.log(), sampler, IDS, mode, cap=3.0).weights
    shuffled = correction(RATIOS.log()[order], sampler, IDS[order] * 7 + 3, mode, cap=3.0).weights
    assert shuffled.tolist() == pytest.approx(straight[order].tolist(), rel=1e-5)


def test_bad_settings():
    with pytest.raises(ConfigError, match="'tis'; expected one of off, token_truncate"):
        weights("tis")
    with pytest.raises(ConfigError, match=r"cap is 0\.5 with floor 1\.0"):
        weights("token_mask", cap=0.5, floor=1.0)
