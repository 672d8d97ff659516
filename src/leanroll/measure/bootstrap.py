"""Bootstraps over whole trajectories, whose tokens are not independent: what the statistics by position and by category share.

Legend: R trajectories, L the longest one's tokens, B bins. A resample is how often each trajectory was drawn, so that sums over
trajectories become one matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from leanroll.errors import ConfigError, UserError


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic and its bootstrap interval at `level`; the interval is NaN where fewer than two trajectories have tokens."""

    value: float
    low: float
    high: float
    level: float


def column_quantiles(values: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Both ends of the interval of each column [draws, B] → [B]; NaN entries are left out."""
    ascending = np.sort(np.ascontiguousarray(values.T), axis=1)  # NaN last
    last = np.maximum((~np.isnan(values)).sum(axis=0) - 1, 0)
    columns = np.arange(len(last))
    ends = []
    for quantile in ((1.0 - level) / 2.0, (1.0 + level) / 2.0):
        place = quantile * last
        below = np.floor(place).astype(np.int64)
        a, b = ascending[columns, below], ascending[columns, np.minimum(below + 1, last)]
        ends.append(a + (place - below) * (b - a))
    return ends[0], ends[1]


def resample_counts(num_trajectories: int, num_resamples: int, seed: int) -> np.ndarray:
    """How often each trajectory was drawn: float64 [num_resamples, num_trajectories], rows sum to num_trajectories."""
    rng = np.random.Generator(np.random.Philox(seed))
    even = np.full(num_trajectories, 1.0 / num_trajectories)
    return rng.multinomial(num_trajectories, even, size=num_resamples).astype(np.float64)


def safe_ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, NaN where b is not positive."""
    return np.where(b > 0, a / np.where(b > 0, b, 1.0), np.nan)


def ratio_estimate(
    top: np.ndarray, bottom: np.ndarray, present: np.ndarray, draws: np.ndarray, level: float
) -> Estimate:
    """A sum over trajectories divided by another, such as a mean over their tokens, with its interval.

    Each draw of trajectories enters both sums, so what they have in common cancels.

    Args:
        top, bottom: [R], what each trajectory adds. present: bool [R], the trajectories that have tokens.
        draws: [num_resamples, R].
    """
    value = float(safe_ratio(np.asarray(top.sum()), np.asarray(bottom.sum())))
    if present.sum() < 2:
        return Estimate(value, np.nan, np.nan, level)
    low, high = column_quantiles(safe_ratio(draws @ top, draws @ bottom)[:, None], level)
    return Estimate(value, float(low[0]), float(high[0]), level)


def length_mask(lengths: np.ndarray) -> np.ndarray:
    """bool [R, L]: which positions each trajectory has."""
    return np.arange(lengths.max()) < lengths[:, None]


def pad_trajectories(values: Sequence[np.ndarray], lengths: np.ndarray) -> np.ndarray:
    """float64 [R, L], 0 past the end of each trajectory."""
    mask = length_mask(lengths)
    padded = np.zeros(mask.shape)
    padded[mask] = np.concatenate(values)
    return padded


def trajectory_lengths(values: Sequence[np.ndarray], name: str) -> np.ndarray:
    """int64 [R], after checks of the arrays."""
    if not len(values):
        raise UserError(f"{name} has no trajectories; expected one array per trajectory.")
    for i, array in enumerate(values):
        if np.ndim(array) != 1 or not len(array):
            raise UserError(
                f"{name}[{i}] has shape {np.shape(array)}; expected [num tokens] with one token or more: leave completions without "
                "tokens out."
            )
        if not np.isfinite(array).all():
            raise UserError(
                f"{name}[{i}] has values that are not finite; expected none: find out which token's logits are broken."
            )
    return np.asarray([len(array) for array in values], dtype=np.int64)


def check_same_lengths(a: np.ndarray, name_a: str, b: np.ndarray, name_b: str) -> None:
    """Raise UserError unless two sides have the same numbers of tokens, int64 [R] each."""
    if len(a) != len(b):
        raise UserError(
            f"{name_a} has {len(a)} trajectories and {name_b} {len(b)}; expected the same ones in one order."
        )
    if (a != b).any():
        i = int((a != b).argmax())
        raise UserError(
            f"Trajectory {i} has {a[i]} tokens in {name_a} and {b[i]} in {name_b}; expected the same tokens on both sides: score "
            "the same rollouts, in one order."
        )


def check_settings(level: float, num_resamples: int, bin_tokens: int = 1) -> None:
    """Raise ConfigError for what no bootstrap or bin can be made with."""
    if bin_tokens < 1 or not 0.0 < level < 1.0 or num_resamples < 1:
        raise ConfigError(
            f"bin_tokens={bin_tokens}, level={level}, num_resamples={num_resamples}; expected at least one token per bin and one "
            "resample, and a level between 0 and 1."
        )
