"""Importance correction for rollouts that were not sampled by the policy being trained.

The sampler (sparse attention, other numerics) drew from q; the policy before the update is p_old. The weight p_old / q,
truncated or masked, multiplies the policy loss and is never differentiated. Sources: Sparrow, arXiv 2606.08446 (token
truncation, cap 3); mode names as TRL's `vllm_importance_sampling_mode`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from leanroll.errors import ConfigError

ImportanceMode = Literal["off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Correction:
    """weights: [R], without gradient; None when the mode is `off`. stats: numbers to log, see `correction`."""

    weights: Tensor | None
    stats: dict[str, float]


@torch.no_grad()
def correction(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    sample_ids: Tensor,
    mode: ImportanceMode,
    *,
    cap: float = 3.0,
    floor: float | None = None,
    mask: Tensor | None = None,
) -> Correction:
    """Weights of R tokens and what they were made from.

    token_truncate: min(ratio, cap) per token (and at least `floor`). token_mask: the ratio, 0 where it is above the cap or
    below the floor. sequence_*: the same with the product of a sequence's token ratios, which all its tokens get.

    Args:
        old_logprobs, sampler_logprobs: [R], of the same distribution settings (temperature, support).
        sample_ids: int64 [R]; a sequence must be here with all its tokens. mask: bool [R], tokens that count (loss mask).
        cap: largest ratio. floor: smallest ratio, None for none.

    Returns:
        weights, and stats over unmasked tokens, whatever the mode:
        `log_ratio_q00` … `log_ratio_q100`: quantiles of log p_old - log q, untruncated; `log_ratio_abs_mean`; `kl_sampler`: the k3
        estimate of KL(q ‖ p_old), mean over tokens; `clipped_share`: tokens (sequences, in sequence modes) whose ratio is outside
        [floor, cap], with mode `off` as if it were token_truncate; `weight_mean`: mean weight over tokens.

    Raises:
        ConfigError: unknown mode, or a cap that is not positive or not above the floor.
    """
    if mode not in get_args(ImportanceMode):
        raise ConfigError(
            f"importance_sampling_mode is {mode!r}; expected one of {', '.join(get_args(ImportanceMode))}."
        )
    low = 0.0 if floor is None else floor
    if not cap > low:
        raise ConfigError(
            f"importance_sampling_cap is {cap} with floor {floor}; expected a positive cap above the floor."
        )
    keep = torch.ones_like(sample_ids, dtype=torch.bool) if mask is None else mask.bool()
    log_ratio = (old_logprobs.detach() - sampler_logprobs.detach()).float()
    log_ratio = log_ratio.masked_fill(~keep, 0.0)
    by_sequence = mode.startswith("sequence")
    num_samples = int(sample_ids.max()) + 1 if sample_ids.numel() else 0
    if by_sequence:
        totals = log_ratio.new_zeros(num_samples).index_add_(0, sample_ids, log_ratio)
        ratio = totals.exp()[sample_ids]
    else:
        ratio = log_ratio.exp()
    outside = (ratio > cap) | (ratio < low)
    weights: Tensor | None = None
    if mode.endswith("truncate"):
        weights = ratio.clamp(min=low, max=cap)
    elif mode.endswith("mask"):
        weights = ratio.masked_fill(outside, 0.0)
    return Correction(weights, _stats(log_ratio, outside, weights, keep, sample_ids, by_sequence))


def _stats(
    log_ratio: Tensor, outside: Tensor, weights: Tensor | None, keep: Tensor, sample_ids: Tensor, by_sequence: bool
) -> dict[str, float]:
    kept = log_ratio[keep].double()
    if kept.numel() == 0:
        return {}
    ordered = kept.sort().values
    # Nearest-rank quantiles: torch.quantile refuses more than 16 million values.
    stats = {
        f"log_ratio_q{round(100 * level):02d}": float(ordered[round(level * (ordered.numel() - 1))])
        for level in QUANTILES
    }
    stats["log_ratio_abs_mean"] = float(kept.abs().mean())
    stats["kl_sampler"] = float((kept.exp() - kept - 1.0).mean())
    if by_sequence:
        clipped = torch.unique(sample_ids[keep & outside]).numel() / torch.unique(sample_ids[keep]).numel()
    else:
        clipped = float(outside[keep].double().mean())
    stats["clipped_share"] = clipped
    stats["weight_mean"] = 1.0 if weights is None else float(weights[keep].double().mean())
    return stats
