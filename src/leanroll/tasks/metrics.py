"""Statistics of an evaluation: P prompts, k samples each; rewards are float [P, k], NaN where a sample is missing.

Intervals resample prompts, not samples: prompts are the independent units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over prompts with its percentile bootstrap interval at `level`; NaN without prompts."""

    mean: float
    low: float
    high: float
    level: float


def mean_at_k(rewards: np.ndarray) -> np.ndarray:
    """Per prompt, the mean over its samples: [P, k] → [P], NaN where all are missing."""
    present = ~np.isnan(rewards)
    count = present.sum(axis=1)
    total = np.where(present, rewards, 0.0).sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def pass_at_k(correct: np.ndarray, k: int) -> np.ndarray:
    """Per prompt, the unbiased estimate 1 - C(n-c, k) / C(n, k) of solving it within k samples: bool [P, n] → [P].

    Source: Chen et al., arXiv 2107.03374, section 2.1.

    Raises:
        ValueError: k is not from 1 to n.
    """
    correct = np.asarray(correct, dtype=bool)
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples per prompt; expected k from 1 to {n}.")
    solved = correct.sum(axis=1)
    # Product form of the ratio of binomials: no overflow. A factor is 0 when fewer than k samples are wrong.
    steps = np.arange(k)
    factors = np.maximum(n - solved[:, None] - steps, 0) / (n - steps)
    return 1.0 - factors.prod(axis=1)


def maj_at_k(
    completions: Sequence[Sequence[str]], rewards: np.ndarray, answer_key: Callable[[str], Hashable | None]
) -> np.ndarray:
    """Per prompt, the mean reward of the samples that give the most frequent answer.

    Ties go to the answer that came first. Samples whose key is None do not vote.

    Args:
        completions: [P][k] texts. rewards: [P, k]. answer_key: `Task.answer_key`.

    Returns:
        float [P]; 0 where no sample votes, NaN where the winners have no reward.
    """
    results = np.zeros(len(completions))
    for p, texts in enumerate(completions):
        keys = [answer_key(text) for text in texts]
        votes = Counter(key for key in keys if key is not None)
        if votes:
            winner = votes.most_common(1)[0][0]  # equal counts keep the order of first occurrence
            chosen = np.array([key == winner for key in keys])
            results[p] = mean_at_k(rewards[p : p + 1, chosen])[0]
    return results


def bootstrap_mean(values: np.ndarray, *, level: float = 0.95, num_resamples: int = 2000, seed: int = 0) -> Interval:
    """Mean of per-prompt values [P] (NaN left out) and its percentile bootstrap interval.

    The same values and seed give the same interval.

    Raises:
        ValueError: level outside (0, 1) or fewer than one resample.
    """
    if not 0 < level < 1 or num_resamples < 1:
        raise ValueError(f"level={level}, num_resamples={num_resamples}; expected 0 < level < 1, at least 1 resample.")
    values = np.asarray(values, dtype=np.float64)
    values = values[~np.isnan(values)]
    if values.size == 0:
        return Interval(np.nan, np.nan, np.nan, level)
    rng = np.random.Generator(np.random.Philox(seed))
    means = np.empty(num_resamples)
    for start in range(0, num_resamples, _CHUNK):  # bounded memory: _CHUNK × P indices at a time
        size = min(_CHUNK, num_resamples - start)
        means[start : start + size] = values[rng.integers(0, values.size, (size, values.size))].mean(axis=1)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(values.mean()), float(low), float(high), level)


def paired_difference(
    first: np.ndarray, second: np.ndarray, *, level: float = 0.95, num_resamples: int = 2000, seed: int = 0
) -> Interval:
    """Mean of first - second over the same prompts, [P] each, with an interval that keeps the pairs together.

    Prompts missing (NaN) on either side are left out.

    Raises:
        ValueError: different shapes.
    """
    first, second = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if first.shape != second.shape:
        raise ValueError(f"Shapes {first.shape} and {second.shape}; paired values need the same prompts in one order.")
    return bootstrap_mean(first - second, level=level, num_resamples=num_resamples, seed=seed)
