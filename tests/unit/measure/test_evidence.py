"""Counts under thresholds, and the tail with its bounds that they give."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanroll.measure.evidence import TailScale

TARGET = 0.9


def scale(z: float = 0.5) -> TailScale:
    return TailScale(TARGET, quantile=0.05, z=z)


def correlated(
    rng: np.random.Generator, trajectories: int, tokens: int, spread: float
) -> tuple[np.ndarray, np.ndarray]:
    """Rates whose mismatch is exponential with a mean that varies between trajectories."""
    means = 0.0334 * np.exp(spread * rng.normal(size=trajectories))
    owners = np.repeat(np.arange(trajectories), tokens)
    return 1.0 - np.minimum(rng.exponential(means[owners]), 1.0), owners


def shares_under_target(alpha: np.ndarray, owners: np.ndarray) -> tuple[float, float]:
    """Share of tokens under the target, and its standard error over trajectories, in plain loops."""
    groups = [alpha[owners == o] for o in np.unique(owners)]
    total = len(alpha)
    share = float((alpha < TARGET).mean())
    residuals = [((g < TARGET).sum() - share * len(g)) ** 2 for g in groups]
    variance = sum(residuals) / total**2 * (len(groups) / max(len(groups) - 1, 1))
    least = 0.05 * 0.95 * sum(len(g) * (1 + 0.02 * (len(g) - 1)) for g in groups) / total**2
    return share, float(np.sqrt(max(variance, least)))


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 80), st.sampled_from([0.0, 0.5]))
def test_whether_a_bound_lies_under_the_target_is_exact(
    seed: int, trajectories: int, tokens: int, spread: float
) -> None:
    alpha, owners = correlated(np.random.default_rng(seed), trajectories, tokens, spread)
    s = scale()
    rows = s.count(alpha, owners)
    estimate = s.estimate(rows, np.ones(len(rows)))
    assert estimate is not None
    share, error = shares_under_target(alpha, owners)
    for bound, value in (
        (estimate.low, share + 0.5 * error),
        (estimate.tail, share),
        (estimate.high, share - 0.5 * error),
    ):
        if abs(value - 0.05) > 1e-9:
            # Shares at neighbouring thresholds can only make the lower bound lower.
            assert (bound < TARGET) == (value > 0.05) or (bound is estimate.low and bound < TARGET)
    assert estimate.low <= estimate.tail <= estimate.high
    assert estimate.tokens == len(alpha)
    assert 0 < estimate.effective <= len(alpha) + 1e-9


@given(st.integers(0, 10_000))
def test_counts_are_those_of_a_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    alpha, owners = rng.random(40), rng.integers(0, 3, 40)
    alpha[:3] = TARGET, 0.0, 1.0
    rows = scale().count(alpha, owners)
    for row, owner in zip(rows, np.unique(owners), strict=True):
        mine = alpha[owners == owner]
        assert row[0] == len(mine)
        assert list(row[1:]) == sorted(row[1:], reverse=True)
        assert row[-1] == 0, "nothing lies under 0"
        assert (mine < TARGET).sum() in row[1:]
    one = scale().count(np.array([TARGET]), np.array([7]))
    under = scale().count(np.array([np.nextafter(TARGET, 0)]), np.array([7]))
    assert under.sum() == one.sum() + 1, "the target itself is one of the thresholds"


@pytest.mark.parametrize("mean", [0.002, 0.01, 0.0334, 0.15, 0.6])
def test_the_tail_is_the_quantile(mean: float) -> None:
    rng = np.random.default_rng(0)
    alpha = 1.0 - np.minimum(rng.exponential(mean, 200_000), 1.0)
    s = scale()
    estimate = s.estimate(s.count(alpha, np.arange(len(alpha)) % 500), np.ones(500))
    assert estimate is not None
    expected = np.quantile(alpha, 0.05)
    assert 1 - estimate.tail == pytest.approx(1 - expected, rel=0.03)


def test_nothing_and_everything() -> None:
    s = scale()
    assert s.estimate(s.count(np.zeros(0), np.zeros(0, dtype=int)), np.zeros(0)) is None
    perfect = s.estimate(s.count(np.ones(4000), np.repeat(np.arange(8), 500)), np.ones(8))
    assert perfect is not None
    assert perfect.tail > 0.99
    assert perfect.low > TARGET
    hopeless = s.estimate(s.count(np.zeros(40), np.repeat(np.arange(8), 5)), np.ones(8))
    assert hopeless is not None
    assert hopeless.high < 0.01


def test_a_trajectory_counts_for_fifty_tokens_at_most_and_old_tokens_for_less() -> None:
    s = scale()
    rows = s.count(np.ones(10_000), np.repeat(np.arange(2), 5000))
    even = s.estimate(rows, np.ones(2))
    aged = s.estimate(rows, np.array([1.0, 0.1]))
    assert even is not None
    assert aged is not None
    assert 90 < even.effective < 100
    assert aged.effective < 0.62 * even.effective
    doubled = s.estimate(rows, 2 * np.ones(2))
    assert doubled == even, "only ratios of weights count"


def test_bounds_hold_as_often_as_they_say() -> None:
    """One standard error, one-sided: 84 % of the time, for tokens that correlate within trajectories."""
    rng = np.random.default_rng(0)
    wide, _ = correlated(rng, 20_000, 20, 0.3)
    truth = np.quantile(wide, 0.05)
    s = scale(z=1.0)
    estimates = [s.estimate(s.count(*correlated(rng, 24, 100, 0.3)), np.ones(24)) for _ in range(300)]
    assert 0.76 < np.mean([e.low <= truth for e in estimates if e]) < 0.95
    assert 0.76 < np.mean([e.high >= truth for e in estimates if e]) < 0.95
