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


@dataclass(frozen=True, slots=True)
class Correction:
    """weights: [R], without gradient; None when the mode is `off`. clipped: bool [R], see `correction`."""

    weights: Tensor | None
    clipped: Tensor


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
    """Weights of R tokens.

    token_truncate: min(ratio, cap) per token (and at least `floor`). token_mask: the ratio, 0 where it is above the cap or
    below the floor. sequence_*: the same with the product of a sequence's token ratios, which all its tokens get.

    Args:
        old_logprobs, sampler_logprobs: [R], of the same distribution settings (temperature, support).
        sample_ids: int64 [R]; a sequence must be here with all its tokens. mask: bool [R], tokens that count (loss mask).
        cap: largest ratio. floor: smallest ratio, None for none.

    Returns:
        weights, and the tokens whose ratio (their sequence's, in sequence modes) is outside [floor, cap]; with mode `off` those
        that token_truncate would have capped. Both mean nothing where the mask is False.

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
    if mode.startswith("sequence"):
        num_samples = int(sample_ids.max()) + 1 if sample_ids.numel() else 0
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
    return Correction(weights, outside)
