"""How alpha is distributed, and how it depends on length. Source of both claims: Sparrow, arXiv 2606.08446, section 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from leanroll.errors import ConfigError
from leanroll.measure.acceptance import HIGH_ACCEPTANCE, tail

MIN_BETA_TOKENS = 50
"""Tokens below HIGH_ACCEPTANCE that a Beta fit needs."""
WINDOW_TOKENS = 256
"""Consecutive tokens of one trajectory whose tail is one sample of the length correlation."""


@dataclass(frozen=True, slots=True)
class BetaFit:
    """alpha / 0.999 of tokens with alpha <= 0.999 as a Beta(a, b) distribution.

    ks: Kolmogorov-Smirnov distance to it. mean, std: of alpha over these tokens. num_tokens: of them; share: of all tokens.
    """

    a: float
    b: float
    ks: float
    mean: float
    std: float
    num_tokens: int
    share: float


def fit_beta(values: np.ndarray) -> BetaFit | None:
    """Maximum-likelihood Beta fit of the tokens that are not simply accepted; None when there are too few.

    Raises:
        ConfigError: scipy is not installed.
    """
    try:
        from scipy import stats
    except ImportError as error:
        raise ConfigError(
            "Beta fits need scipy, which is not installed; run `pip install 'leanroll[calibrate]'`."
        ) from error
    low = values[values <= HIGH_ACCEPTANCE].astype(np.float64)
    if len(low) < MIN_BETA_TOKENS:
        return None
    # The likelihood is infinite at the ends of the interval.
    scaled = np.clip(low / HIGH_ACCEPTANCE, 1e-6, 1.0 - 1e-6)
    a, b, _, _ = stats.beta.fit(scaled, floc=0.0, fscale=1.0)
    ks = float(stats.kstest(scaled, stats.beta(a, b).cdf).statistic)
    return BetaFit(
        float(a), float(b), ks, float(low.mean()), float(low.std()), len(low), float(len(low) / max(len(values), 1))
    )


@dataclass(frozen=True, slots=True)
class LengthCorrelation:
    """Pearson's r with length: of alpha per token, and of the tail per window (`WINDOW_TOKENS` consecutive tokens of one
    trajectory, against the length at its middle)."""

    per_token: float
    per_window: float
    num_tokens: int
    num_windows: int


def length_correlation(
    rates: Sequence[np.ndarray], first_lengths: Sequence[int], quantile: float
) -> LengthCorrelation | None:
    """rates: alpha per trajectory; first_lengths: tokens in the cache at its first one. None with fewer than three windows."""
    lengths = [first + np.arange(len(r)) for r, first in zip(rates, first_lengths, strict=True)]
    tails, middles = [], []
    for alpha, total in zip(rates, lengths, strict=True):
        for start in range(0, len(alpha) - WINDOW_TOKENS + 1, WINDOW_TOKENS):
            tails.append(tail(alpha[start : start + WINDOW_TOKENS], quantile))
            middles.append(float(total[start : start + WINDOW_TOKENS].mean()))
    if len(tails) < 3:
        return None
    return LengthCorrelation(
        _pearson(np.concatenate(rates), np.concatenate(lengths)),
        _pearson(np.array(tails), np.array(middles)),
        sum(len(r) for r in rates),
        len(tails),
    )


def _pearson(x: np.ndarray, y: np.ndarray) -> float:
    """0 where one of the two does not vary."""
    x, y = x.astype(np.float64) - x.mean(), y.astype(np.float64) - y.mean()
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum() / scale) if scale > 0.0 else 0.0
