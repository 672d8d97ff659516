"""Mismatch of sampler and policy by position: against hand-computed numbers, and what it may not depend on."""

import math

import numpy as np
import pytest

from leanroll.rundir_metrics import check_record
from leanroll.train.mismatch import mismatch_by_position


def test_by_hand() -> None:
    """Two completions, of 3 and 2 tokens, bins of two tokens."""
    ratio = np.array([1.0, 0.5, 2.0, 1.5, 1.0])
    metrics = mismatch_by_position(np.log(ratio), np.array([0, 1, 2, 0, 1]), bin_tokens=2)
    near = [1.0, 0.5, 1.5, 1.0]
    assert metrics["mismatch/pos_0/kl"] == pytest.approx(sum(r - math.log(r) - 1 for r in near) / 4)
    assert metrics["mismatch/pos_0/ratio_mean"] == pytest.approx(1.0)
    assert metrics["mismatch/pos_0/ratio_p50"] == pytest.approx(1.0)
    assert metrics["mismatch/pos_0/ratio_p05"] == pytest.approx(0.5 + 0.15 * 0.5)
    assert metrics["mismatch/pos_0/ratio_p95"] == pytest.approx(1.0 + 0.85 * 0.5)
    assert metrics["mismatch/pos_0/tokens"] == 4
    assert metrics["mismatch/pos_2/kl"] == pytest.approx(1.0 - math.log(2.0))
    assert metrics["mismatch/pos_2/tokens"] == 1
    assert check_record({"step": 1, **metrics}), "every name is in the schema"


def test_rise_is_the_weighted_line_through_the_bins() -> None:
    rng = np.random.default_rng(2)
    positions = np.repeat(np.arange(0, 40, 10), (50, 30, 15, 5))
    log_ratio = rng.normal(scale=0.1 + 0.01 * positions)
    metrics = mismatch_by_position(log_ratio, positions, bin_tokens=10)
    starts, tokens = [0, 10, 20, 30], [50, 30, 15, 5]
    kl = [metrics[f"mismatch/pos_{start}/kl"] for start in starts]
    slope, _ = np.polyfit(starts, kl, 1, w=np.sqrt(tokens))
    assert metrics["mismatch/rise"] == pytest.approx(slope * 30)
    assert metrics["mismatch/rise"] > 0
    assert "mismatch/rise" not in mismatch_by_position(log_ratio, positions, bin_tokens=100), "one bin has no slope"
    assert mismatch_by_position(np.zeros(0), np.zeros(0, dtype=np.int64), bin_tokens=10) == {}


def test_order_does_not_matter_at_all() -> None:
    """What micro-batching changes is the order of the tokens."""
    rng = np.random.default_rng(0)
    log_ratio = rng.normal(scale=0.3, size=1000).astype(np.float32)
    positions = rng.integers(0, 300, size=1000)
    order = rng.permutation(1000)
    first = mismatch_by_position(log_ratio, positions, bin_tokens=64)
    assert first == mismatch_by_position(log_ratio[order], positions[order], bin_tokens=64)
    assert sorted(int(name.split("/")[1].removeprefix("pos_")) for name in first if name.endswith("/kl")) == [
        0, 64, 128, 192, 256,
    ]  # fmt: skip


def test_the_estimate_is_the_divergence() -> None:
    """Tokens drawn from q, ratios p/q: the mean of k3 comes out at KL(q ‖ p) computed from the distributions."""
    rng = np.random.default_rng(1)
    q = rng.dirichlet(np.ones(20))
    p = rng.dirichlet(np.full(20, 5.0)) * 0.3 + q * 0.7
    drawn = rng.choice(20, size=200_000, p=q)
    metrics = mismatch_by_position(np.log(p / q)[drawn], np.zeros(len(drawn), dtype=np.int64), bin_tokens=8)
    assert metrics["mismatch/pos_0/kl"] == pytest.approx(float((q * np.log(q / p)).sum()), rel=0.05)


def test_passes_count_a_token_once() -> None:
    log_ratio, positions = np.array([0.1, -0.2, 0.3]), np.array([0, 1, 2])
    once = mismatch_by_position(log_ratio, positions, bin_tokens=3)
    twice = mismatch_by_position(np.tile(log_ratio, 2), np.tile(positions, 2), bin_tokens=3, num_passes=2)
    assert twice["mismatch/pos_0/tokens"] == 3
    assert twice["mismatch/pos_0/kl"] == pytest.approx(once["mismatch/pos_0/kl"])
