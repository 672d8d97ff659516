"""Weights that aim a loss at the tokens where the sampler is worst: the tail is what decides, not the mean.

Computed once for a whole optimizer step, so that the sum over micro-batches, however cut, is the same.
Source of the finding: Sparrow, arXiv 2606.08446. CVaR: mean over the worst share (Rockafellar and Uryasev, 2000).
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np

from leanroll.errors import ConfigError, UserError

TailWeighting = Literal["none", "cvar", "one_minus_alpha"]


def needs_alpha(weighting: TailWeighting) -> bool:
    """Whether `tail_weights` looks at the acceptance rates."""
    return weighting != "none"


def tail_weights(
    counts: np.ndarray, weighting: TailWeighting = "none", alpha: np.ndarray | None = None, *, share: float = 0.05
) -> np.ndarray:
    """Weight of each token, float64 [R]; they sum to 1 (to 0 where every alpha is 1 under one_minus_alpha).

    none: the mean over the tokens that count. cvar: the mean over the worst `share` of them, by alpha, at least one token; of
    equal ones the earlier. one_minus_alpha: the mean weighted with 1 - alpha.

    Args:
        counts: bool [R], the tokens of the step that enter the loss. alpha: [R] acceptance rates, for all weightings but none.
        share: of the tokens, in (0, 1].

    Raises:
        ConfigError: unknown weighting, or a share out of range. UserError: no token counts, or alpha is missing.
    """
    if weighting not in get_args(TailWeighting):
        raise ConfigError(f"The tail weighting is {weighting!r}; expected one of {', '.join(get_args(TailWeighting))}.")
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"The tail's share is {share}; expected more than 0 and at most 1.")
    chosen = np.flatnonzero(counts)
    if not chosen.size:
        raise UserError("No token counts, so there is nothing to weight; leave this update out.")
    weights = np.zeros(counts.shape, dtype=np.float64)
    if weighting == "none":
        weights[chosen] = 1.0 / chosen.size
        return weights
    if alpha is None or alpha.shape != counts.shape:
        got = "none" if alpha is None else str(alpha.shape)
        raise UserError(f"Tail weighting {weighting!r} needs an alpha per token, shape {counts.shape}; got {got}.")
    if weighting == "cvar":
        worst = chosen[np.argsort(alpha[chosen], kind="stable")[: math.ceil(share * chosen.size)]]
        weights[worst] = 1.0 / worst.size
        return weights
    distance = 1.0 - alpha[chosen].astype(np.float64)
    total = float(distance.sum())
    if total > 0.0:
        weights[chosen] = distance / total
    return weights
