"""What a sample of tokens says about the tail of acceptance: the quantile, and bounds on it that know whose tokens they are.

Everything is a count of tokens whose acceptance rate lies under a threshold, per trajectory. Counts of several steps add up, weigh
less as they age, and are small to keep, which the rates themselves are not. Never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_STEPS_PER_DOUBLING = 4
_FINEST = 64
"""The thresholds nearest 1 are a doubling apart as often as this number is."""
_CORRELATION = 0.02
"""Least correlation of two tokens of a trajectory that is assumed. So one trajectory counts for at most 50 independent tokens."""


@dataclass(frozen=True, slots=True)
class TailEstimate:
    """tail: the quantile of alpha. low, high: one-sided bounds on it. tokens: that it rests on, not weighted. effective:
    independent tokens that are worth as much, ages and trajectories considered."""

    tail: float
    low: float
    high: float
    tokens: int
    effective: float


class TailScale:
    """Thresholds of alpha around a target, and what counts under them say.

    They are evenly spaced in the logarithm of the mismatch 1 - alpha, and the target is one of them, so that whether a bound lies
    under the target does not depend on their spacing.

    Args:
        target: of the tail, below 1. quantile: the share of tokens in the tail. z: standard errors from the estimate to its bounds.
    """

    def __init__(self, target: float, *, quantile: float, z: float) -> None:
        self.target, self.quantile, self._z = target, quantile, z
        above = np.arange(-_STEPS_PER_DOUBLING * int(np.log2(_FINEST)), 0)
        below = np.arange(0, int(np.ceil(_STEPS_PER_DOUBLING * np.log2(1.0 / (1.0 - target)))))
        self._mismatch = np.append((1.0 - target) * 2.0 ** (np.append(above, below) / _STEPS_PER_DOUBLING), 1.0)
        self._thresholds = 1.0 - self._mismatch
        self._thresholds[len(above)] = target  # exactly

    @property
    def width(self) -> int:
        """Numbers in a row of counts."""
        return len(self._thresholds) + 1

    def count(self, alpha: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """One row per trajectory, int64 [trajectories, width]: its tokens, then how many lie under each threshold.

        alpha: [T]. owners: [T], the number of the trajectory each token is from.
        """
        _, places = np.unique(owners, return_inverse=True)
        rows = np.zeros((places.max() + 1 if len(places) else 0, self.width), dtype=np.int64)
        np.add.at(rows[:, 0], places, 1)
        # A token lies under the thresholds above its rate; these descend.
        first = np.searchsorted(-self._thresholds, -alpha.astype(np.float64), side="left")
        under = np.zeros_like(rows)
        np.add.at(under, (places, first), 1)
        rows[:, 1:] = np.cumsum(under[:, ::-1], axis=1)[:, ::-1][:, 1:]
        return rows

    def estimate(self, rows: np.ndarray, weights: np.ndarray) -> TailEstimate | None:
        """The tail of the weighted tokens; None without any.

        The bounds are where the share of tokens under a threshold, moved by z standard errors, equals the quantile. The standard
        error is that of a ratio of sums over trajectories, and never less than that of tokens which correlate a little.

        rows: int64 [R, width], as `count` returns them. weights: [R], above 0.
        """
        if not len(rows):
            return None
        tokens, under = rows[:, 0].astype(np.float64), rows[:, 1:].astype(np.float64)
        total = weights @ tokens
        share = weights @ under / total
        squared = weights**2
        residual = under - share * tokens[:, None]
        variance = squared @ residual**2 / total**2 * (len(rows) / max(len(rows) - 1, 1))
        inverse = float(squared @ (tokens * (1.0 + _CORRELATION * (tokens - 1.0))) / total**2)
        error = np.sqrt(np.maximum(variance, self.quantile * (1.0 - self.quantile) * inverse))
        return TailEstimate(
            tail=self._crossing(share),
            low=self._crossing(share + self._z * error),
            high=self._crossing(share - self._z * error),
            tokens=int(rows[:, 0].sum()),
            effective=1.0 / inverse,
        )

    def _crossing(self, share: np.ndarray) -> float:
        """The threshold under which `quantile` of the tokens lie; share: under each threshold."""
        share = np.maximum.accumulate(share[::-1])[::-1]  # counts descend already; a bound need not
        at = int(np.searchsorted(-share, -self.quantile))  # first threshold with no more than the quantile under it
        if at == 0 or at == len(share):
            return float(self._thresholds[min(at, len(share) - 1)])
        if share[at] == self.quantile:
            return float(self._thresholds[at])
        part = (share[at - 1] - self.quantile) / (share[at - 1] - share[at])
        log = (1.0 - part) * np.log(self._mismatch[at - 1]) + part * np.log(self._mismatch[at])
        return float(1.0 - np.exp(log))
