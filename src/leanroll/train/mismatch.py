"""How far the sampler is from the policy, by position in the completion."""

from __future__ import annotations

import numpy as np

_PERCENTILES = (5, 50, 95)


def mismatch_by_position(
    log_ratio: np.ndarray, positions: np.ndarray, *, bin_tokens: int, num_passes: int = 1
) -> dict[str, float]:
    """Metrics `mismatch/pos_<start>/…` of every bin of positions that has tokens, and `mismatch/rise` where there are two.

    The KL is that of the sampler to the policy, estimated on the sampler's own tokens by k3, the mean of r - log r - 1:
    unbiased, and never negative. Bit for bit the same for any order of the tokens, so for any order of micro-batches with
    the same log-probs. Source of k3: Schulman, "Approximating KL Divergence" (2020).

    Args:
        log_ratio: [R], log r = log p_old - log q_sampler. positions: int [R], index in the completion, from 0.
        bin_tokens: width of a bin. num_passes: how often every token is in the arrays.
    """
    bins = positions // bin_tokens
    order = np.lexsort((log_ratio, bins))
    found, first = np.unique(bins[order], return_index=True)
    metrics: dict[str, float] = {}
    if not len(found):
        return metrics
    kl: list[float] = []
    for number, values in zip(found, np.split(log_ratio[order].astype(np.float64), first[1:]), strict=True):
        prefix = f"mismatch/pos_{int(number) * bin_tokens}/"
        ratio = np.exp(values)
        kl.append(float((np.expm1(values) - values).mean()))
        metrics[f"{prefix}kl"] = kl[-1]
        metrics[f"{prefix}ratio_mean"] = float(ratio.mean())
        for percent in _PERCENTILES:
            metrics[f"{prefix}ratio_p{percent:02d}"] = float(np.percentile(ratio, percent))
        metrics[f"{prefix}tokens"] = len(values) // num_passes
    if len(found) > 1:
        metrics["mismatch/rise"] = _rise(found, kl, np.diff([*first, len(bins)]))
    return metrics


def _rise(bins: np.ndarray, kl: list[float], tokens: np.ndarray) -> float:
    """Rise from the first to the last of at least two bins, by the line of least squares weighted by tokens."""
    x, y, weights = bins.astype(np.float64), np.asarray(kl), tokens / tokens.sum()
    x = x - weights @ x
    return float((weights * x) @ y / (weights @ x**2) * (x[-1] - x[0]))
