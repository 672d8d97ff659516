from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from leanroll.tasks.metrics import bootstrap_mean, maj_at_k, mean_at_k, paired_difference, pass_at_k


def test_mean_at_k_leaves_missing_samples_out() -> None:
    rewards = np.array([[1, 0, np.nan], [np.nan, np.nan, np.nan], [1, 1, 1]])
    np.testing.assert_array_equal(mean_at_k(rewards), [0.5, np.nan, 1])


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_solution(k: int) -> None:
    correct = np.array([[c >= 5 - solved for c in range(5)] for solved in range(6)])
    expected = [np.mean([any(row[list(pick)]) for pick in combinations(range(5), k)]) for row in correct]
    np.testing.assert_allclose(pass_at_k(correct, k), expected)


def test_pass_at_k_of_many_samples_does_not_overflow() -> None:
    correct = np.zeros((1, 10_000), dtype=bool)
    correct[0, 0] = True
    np.testing.assert_allclose(pass_at_k(correct, 5_000), [0.5])


@pytest.mark.parametrize("k", [0, 4])
def test_pass_at_k_bounds(k: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 3"):
        pass_at_k(np.ones((2, 3), dtype=bool), k)


def test_maj_at_k() -> None:
    completions = [["a", "b", "b"], ["b", "a", "?"], ["?", "?", "?"], ["a", "a", "b"]]
    rewards = np.array([[0, 1, 1], [0, 1, 0], [1, 1, 1], [np.nan, 0.5, 1]])
    result = maj_at_k(completions, rewards, lambda text: None if text == "?" else text)
    np.testing.assert_array_equal(result, [1, 0, 0, 0.5])


def test_bootstrap_covers_and_repeats() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(100):
        interval = bootstrap_mean(rng.normal(0.3, 1.0, 100), num_resamples=500, seed=trial)
        covered += interval.low <= 0.3 <= interval.high
    assert 88 <= covered <= 99
    values = rng.normal(size=50)
    assert bootstrap_mean(values, seed=1) == bootstrap_mean(values, seed=1)
    assert bootstrap_mean(values, seed=1) != bootstrap_mean(values, seed=2)


def test_bootstrap_width_matches_the_normal_approximation() -> None:
    values = np.random.default_rng(1).normal(size=400)
    interval = bootstrap_mean(np.append(values, np.nan), num_resamples=4000)
    half = 1.96 * values.std() / 20
    np.testing.assert_allclose([interval.low, interval.high], values.mean() + np.array([-half, half]), atol=0.015)


def test_pairing_narrows_the_interval() -> None:
    rng = np.random.default_rng(2)
    base = rng.normal(size=200)
    better = base + 0.1 + 0.01 * rng.normal(size=200)
    interval = paired_difference(better, base)
    assert 0.09 < interval.low < interval.mean < interval.high < 0.11
    better[0] = np.nan
    assert np.isfinite(paired_difference(better, base).mean)


def test_edges() -> None:
    assert np.isnan(bootstrap_mean(np.array([np.nan])).mean)
    single = bootstrap_mean(np.array([0.5]))
    assert (single.low, single.mean, single.high) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="level"):
        bootstrap_mean(np.ones(3), level=1.0)
    with pytest.raises(ValueError, match="paired"):
        paired_difference(np.ones(3), np.ones(2))
