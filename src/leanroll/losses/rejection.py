"""What is too far off policy to train on: whole sequences by their ratios, single tokens by the second moment.

Both judge the ratio p_old / q_sampler before any cap, from log-probs that are known before the first update, so that the decision
depends neither on micro-batches nor on the updates themselves.

Sources: bounds on the geometric mean and a veto by any one token, as verl's rollout correction and prime-rl have them; the second
moment of M2PO (arXiv 2510.01161), there on current / behaviour policy with a bound of 0.04.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from leanroll.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RatioLimits:
    """Bounds of p_old / q_sampler; None: not looked at.

    geo_low, geo_high: of a sequence's geometric mean, its product to the power 1 / length. veto_low, veto_high: of every token of
    a sequence. m2: of the mean squared log ratio over all tokens that are left, nats².
    """

    geo_low: float | None = None
    geo_high: float | None = None
    veto_low: float | None = None
    veto_high: float | None = None
    m2: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            below, above = field.name.endswith("_low"), field.name.endswith("_high")
            if value is not None and not (0.0 < value < float("inf") and not (below and value >= 1.0)):
                raise ConfigError(f"{field.name} is {value}; expected {'0 to 1' if below else 'a positive number'}.")
            if value is not None and above and value <= 1.0:
                raise ConfigError(f"{field.name} is {value}; expected more than 1, the ratio of two equal policies.")

    @property
    def active(self) -> bool:
        """Whether anything is looked at."""
        return any(getattr(self, field.name) is not None for field in fields(self))


@dataclass(frozen=True, slots=True)
class Rejection:
    """What is left out. All on the CPU.

    by_mean, by_token: bool [N], sequences outside the bounds of the geometric mean, and those with a token outside its own.
    outliers: bool [R], tokens that the second moment takes out of the sequences that stay; False elsewhere.
    m2_before, m2_after: mean squared log ratio of the tokens of the sequences that stay, with and without the outliers; None where
        there are no such tokens.
    """

    by_mean: Tensor
    by_token: Tensor
    outliers: Tensor
    m2_before: float | None
    m2_after: float | None

    @property
    def sequences(self) -> Tensor:
        """Rejected sequences, bool [N]."""
        return self.by_mean | self.by_token


@torch.no_grad()
def reject(
    log_ratio: Tensor, sample_ids: Tensor, num_samples: int, limits: RatioLimits, *, mask: Tensor | None = None
) -> Rejection:
    """Judge all sequences of a rollout batch, then the tokens of those that stay.

    The second moment takes out the tokens with the largest |log ratio|, as few as bring the mean square of the rest to the bound;
    of equal ones, the last. When not even the smallest is within the bound, all go.

    Args:
        log_ratio: [R], log p_old - log q_sampler. sample_ids: int64 [R], from 0 to num_samples - 1; all tokens of a sequence.
        mask: bool [R], tokens that count (loss mask); a sequence without any is never rejected.
    """
    values = log_ratio.detach().to("cpu", torch.float64)
    ids = sample_ids.cpu()
    keep = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to("cpu", torch.bool)
    counted, owners = values[keep], ids[keep]
    sums = torch.zeros(num_samples, dtype=torch.float64).index_add_(0, owners, counted)
    lengths = torch.zeros(num_samples, dtype=torch.float64).index_add_(0, owners, torch.ones_like(counted))
    by_mean = _outside((sums / lengths.clamp(min=1.0)).exp(), limits.geo_low, limits.geo_high)
    beyond = _outside(counted.exp(), limits.veto_low, limits.veto_high)
    by_token = torch.zeros(num_samples, dtype=torch.bool).index_fill_(0, owners[beyond], True)

    left = keep & ~(by_mean | by_token)[ids]
    squares = values[left].square()
    outliers = torch.zeros_like(left)
    before = after = float(squares.mean()) if squares.numel() else None
    if limits.m2 is not None and squares.numel():
        ascending, order = squares.sort(stable=True)
        means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1)
        # Means of ascending values ascend: those within the bound come first.
        num_kept = int((means <= limits.m2).sum())
        outliers[left.nonzero()[:, 0][order[num_kept:]]] = True
        after = float(means[num_kept - 1]) if num_kept else None
    return Rejection(by_mean, by_token, outliers, before, after)


def _outside(ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    if low is not None:
        outside |= ratio < low
    if high is not None:
        outside |= ratio > high
    return outside
