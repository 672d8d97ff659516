"""The policy loss by hand: advantages, denominators, clipping, masks, sums."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leanroll.errors import ConfigError
from leanroll.losses.policy import advantages, completion_mask, denominators, most_varied, policy_loss
from tests.assertions import assert_close


def test_advantages_by_hand():
    rewards = np.array([[1.0, 0.0], [2.0, 2.0]])
    np.testing.assert_allclose(advantages(rewards, "group", eps=1e-12)[0], [0.5**0.5, -(0.5**0.5)])
    np.testing.assert_array_equal(advantages(rewards, "group")[1], [0.0, 0.0])
    np.testing.assert_allclose(advantages(rewards, "none"), [[0.5, -0.5], [0.0, 0.0]])
    std = np.std([1.0, 0.0, 2.0, 2.0], ddof=1)
    np.testing.assert_allclose(advantages(rewards, "batch", eps=0.1)[0], [0.5 / (std + 0.1), -0.5 / (std + 0.1)])


def test_missing_samples_count_nowhere():
    with_gap = advantages(np.array([[1.0, np.nan, 0.0, 0.5]]))
    np.testing.assert_allclose(with_gap[0, [0, 2, 3]], advantages(np.array([[1.0, 0.0, 0.5]]))[0])
    assert with_gap[0, 1] == 0.0
    np.testing.assert_array_equal(advantages(np.array([[3.0, np.nan], [np.nan, np.nan]])), np.zeros((2, 2)))
    batch = advantages(np.array([[1.0, 0.0, np.nan]]), "batch", eps=1e-12)
    np.testing.assert_allclose(batch[0], [0.5**0.5, -(0.5**0.5), 0.0])


@given(st.lists(st.sampled_from([0.0, 0.3, 0.5, 1.0, np.nan]), min_size=2, max_size=8), st.integers(2, 8))
def test_most_varied_is_the_subset_of_largest_variance(rewards, count):
    rewards = np.array([rewards])
    kept = most_varied(rewards, count)[0]
    present = rewards[0][np.isfinite(rewards[0])]
    size = min(count, len(present))
    chosen = np.isfinite(kept)
    assert chosen.sum() == size
    np.testing.assert_array_equal(kept[chosen], rewards[0][chosen])
    if size:
        best = max(np.var(subset) for subset in itertools.combinations(present, size))
        assert np.var(kept[chosen]) == pytest.approx(best)


def test_groups_of_one_need_no_std():
    with pytest.raises(ConfigError, match=r"num_generations is 1 .* scale_rewards='none'"):
        advantages(np.ones((3, 1)))
    np.testing.assert_array_equal(advantages(np.ones((3, 1)), "none"), np.zeros((3, 1)))
    with pytest.raises(ConfigError, match=r"advantage eps is 0\.0; expected a positive number"):
        advantages(np.ones((1, 2)), eps=0.0)
    with pytest.raises(ConfigError, match="'best'; expected one of group, batch, none"):
        advantages(np.ones((1, 2)), "best")


def test_denominators_by_hand():
    lengths = torch.tensor([2, 0, 6])
    assert denominators("grpo", lengths).tolist() == [6.0, 3.0, 18.0]
    assert denominators("bnpo", lengths).tolist() == [8.0] * 3
    assert denominators("dapo", lengths, num_tokens=20.5).tolist() == [20.5] * 3
    assert denominators("dr_grpo", lengths, max_completion_length=10).tolist() == [30.0] * 3
    assert denominators("grpo", lengths, num_samples=6).tolist() == [12.0, 6.0, 36.0]
    assert denominators("dapo", torch.tensor([0, 0])).tolist() == [1.0, 1.0]
    with pytest.raises(ConfigError, match="max_completion_length"):
        denominators("dr_grpo", lengths)
    with pytest.raises(ConfigError, match="'ppo'; expected one of grpo, bnpo, dapo, dr_grpo"):
        denominators("ppo", lengths)


def one_token(ratio, advantage, **options):
    """Loss and gradient with respect to the log-prob of a single token."""
    logprob = torch.tensor([np.log(ratio)], requires_grad=True)
    loss, sums = policy_loss(
        logprob,
        torch.zeros(1),
        torch.tensor([advantage]),
        torch.ones(1),
        torch.zeros(1, dtype=torch.long),
        **{"clip_low": 0.2, "clip_high": 0.28, **options},
    )
    loss.backward()
    return float(loss.detach()), float(logprob.grad), sums


@pytest.mark.parametrize(
    ("ratio", "advantage", "delta", "loss", "grad"),
    [
        (1.0, 2.0, None, -2.0, -2.0),
        (1.1, 2.0, None, -2.2, -2.2),
        (1.5, 2.0, None, -2.56, 0.0),  # above the region, pushed further: clipped
        (1.5, -2.0, None, 3.0, 3.0),  # above the region, pushed back: kept
        (0.5, 2.0, None, -1.0, -1.0),
        (0.5, -2.0, None, 1.6, 0.0),
        (9.0, -2.0, 3.0, 6.0, 0.0),  # dual clip bounds the loss
        (2.0, -2.0, 3.0, 4.0, 4.0),
        (9.0, 2.0, 3.0, -2.56, 0.0),
    ],
)
def test_clipping_of_one_token(ratio, advantage, delta, loss, grad):
    actual = one_token(ratio, advantage, delta=delta)
    assert actual[:2] == pytest.approx((loss, grad), abs=1e-5)


def test_sums_are_over_unmasked_tokens():
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0])
    mask = torch.tensor([True, True, True, True, False])
    loss, sums = policy_loss(
        ratios.log(),
        torch.zeros(5),
        torch.tensor([1.0, -1.0]),
        torch.tensor([4.0, 4.0]),
        torch.tensor([0, 1, 0, 1, 1]),
        clip_low=0.2,
        clip_high=0.28,
        mask=mask,
        weights=torch.tensor([1.0, 2.0, 1.0, 1.0, 100.0]),
        ref_logprobs=torch.zeros(5),
        entropy=torch.arange(5.0),
    )
    expected = (-1.28 + 2 * 1.5 - 0.5 + 0.8) / 4
    assert float(loss) == pytest.approx(expected)
    values = {name: float(value) for name, value in sums.items()}
    assert values == pytest.approx(
        {
            "num_tokens": 4,
            "clipped_low": 1,
            "clipped_high": 1,
            "ratio": 4.0,
            "kl_old": float((ratios - 1 - ratios.log())[:4].sum()),
            "policy_loss": expected,
            "entropy": 6.0,
            "kl_ref": float((ratios * (1 / ratios - 1 + ratios.log()))[:4].sum()),
        },
        rel=1e-5,
    )


def test_kl_has_the_reverse_kl_gradient():
    """With draws from the old policy, r·k3 has the gradient of KL(policy ‖ reference): checked by enumeration."""
    logits = torch.randn(6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ref = torch.randn(6, generator=torch.Generator().manual_seed(1)).log_softmax(0)
    old = torch.randn(6, generator=torch.Generator().manual_seed(2)).log_softmax(0)
    logprobs = logits.log_softmax(0)
    exact = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True)[0]
    loss, _ = policy_loss(
        logprobs,
        old,
        torch.zeros(6),
        1.0 / old.exp(),  # the probability of drawing each token
        torch.arange(6),
        clip_low=0.2,
        clip_high=0.2,
        beta=1.0,
        ref_logprobs=ref,
    )
    assert_close(torch.autograd.grad(loss, logits)[0], exact)


def test_truncated_completions_are_masked_on_request():
    ids = torch.tensor([0, 0, 1, 2])
    assert completion_mask(["stop", "length", "stop"], ids, True).tolist() == [True, True, False, True]
    assert completion_mask(["stop", "length", "stop"], ids, False).tolist() == [True] * 4


def test_settings_without_effect_or_sense_raise():
    with pytest.raises(ConfigError, match=r"beta is 0\.1, but there are no reference log-probs"):
        one_token(1.0, 1.0, beta=0.1)
    with pytest.raises(ConfigError, match=r"delta is 1\.2; expected more than .*1\.28"):
        one_token(1.0, 1.0, delta=1.2)


def test_a_masked_token_that_overflows_changes_nothing():
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    old, ref = torch.tensor([-1.5, -200.0]), torch.tensor([-1.2, 200.0])
    loss, sums = policy_loss(
        logprobs, old, torch.tensor([-1.0]), torch.tensor([1.0]), torch.zeros(2, dtype=torch.long),
        clip_low=0.2, clip_high=0.28, delta=1.5, beta=0.1, ref_logprobs=ref, mask=torch.tensor([True, False]),
    )  # fmt: skip
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad).all()
    assert logprobs.grad[1] == 0
    assert all(torch.isfinite(value) for value in sums.values())
    assert (float(sums["num_tokens"]), float(sums["clipped_dual"])) == (1.0, 1.0)
