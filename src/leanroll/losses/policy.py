"""The GRPO family as one pure function of flat per-token tensors.

Every variant is the same sum, `sum_t mask_t · l_t / denominator[sample_t]`, with another denominator. Denominators are computed
once for a whole optimizer step (`denominators`) and passed in, so that the sum over micro-batches, however cut, is the same.

Legend: R tokens of a micro-batch, N samples of the optimizer step.
Sources: GRPO (arXiv 2402.03300), Dr. GRPO (2503.20783), DAPO (2503.14476), dual clip (1912.09729); names as in TRL.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from leanroll.errors import ConfigError

LossType = Literal["grpo", "bnpo", "dapo", "dr_grpo"]
ScaleRewards = Literal["group", "batch", "none"]


def advantages(rewards: np.ndarray, scale: ScaleRewards = "group", eps: float = 1e-6) -> np.ndarray:
    """Advantages (R - mean of the group) / (std + eps), float64 [num_groups, G].

    Args:
        rewards: [num_groups, G]; NaN marks a sample that does not exist: it counts nowhere and gets advantage 0.
        scale: divide by the std of the group, of the whole batch, or not at all. The std is the unbiased one (n - 1).
        eps: added to the std. TRL uses 1e-4, Sparrow 1e-6.

    Raises:
        ConfigError: unknown scale, eps not positive, or groups of one with `scale="group"`.
    """
    _check_choice("scale_rewards", scale, get_args(ScaleRewards))
    rewards = np.asarray(rewards, dtype=np.float64)
    if not eps > 0.0:
        raise ConfigError(f"advantage eps is {eps}; expected a positive number, since a group can have a std of 0.")
    if scale == "group" and rewards.shape[1] < 2:
        raise ConfigError(
            f"num_generations is {rewards.shape[1]} with scale_rewards='group'; a std needs at least 2 samples per prompt. "
            "Raise num_generations or set scale_rewards='none'."
        )
    present = np.isfinite(rewards)
    count = present.sum(axis=1, keepdims=True)
    mean = np.where(present, rewards, 0.0).sum(axis=1, keepdims=True) / np.maximum(count, 1)
    centred = np.where(present, rewards - mean, 0.0)
    if scale == "group":
        variance = (centred**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1)
    elif scale == "batch":
        values = rewards[present]
        variance = np.var(values, ddof=1) if values.size > 1 else 0.0
    else:
        return centred
    return centred / (np.sqrt(variance) + eps)


def most_varied(rewards: np.ndarray, count: int) -> np.ndarray:
    """The `count` samples of each group whose rewards have the largest variance; the others become NaN (not there).

    They are always some of the highest and the rest of the lowest (PODS, arXiv 2504.13818). Among equal rewards the earlier samples
    are taken.

    Args:
        rewards: [num_groups, G]; NaN marks a sample that does not exist. A group with `count` samples or fewer keeps them all.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    kept = np.full_like(rewards, np.nan)
    for row, out in zip(rewards, kept, strict=True):
        present = np.flatnonzero(np.isfinite(row))
        size = min(count, len(present))
        if size == 0:
            continue
        ascending = present[np.argsort(row[present], kind="stable")]
        descending = present[np.argsort(-row[present], kind="stable")]
        choices = [np.concatenate([descending[:high], ascending[: size - high]]) for high in range(size + 1)]
        # With equal rewards both orders may begin with the same samples: such a choice is too small.
        best = max((c for c in choices if len(np.unique(c)) == size), key=lambda chosen: float(np.var(row[chosen])))
        out[best] = row[best]
    return kept


def denominators(
    loss_type: LossType,
    lengths: Tensor,
    *,
    max_completion_length: int | None = None,
    num_samples: float | None = None,
    num_tokens: float | None = None,
) -> Tensor:
    """What each sample's token losses are divided by, float32 [N].

    grpo: N · own length (mean over tokens, then over samples). bnpo, dapo: all unmasked tokens of the step. dr_grpo: N ·
    max_completion_length. bnpo and dapo differ only in what `num_tokens` counts when one rollout batch gives several optimizer
    steps: bnpo the tokens of this step, dapo the average per step of the rollout batch (TRL's definition).

    Args:
        lengths: [N] unmasked tokens per sample (0 where the sample is masked out; it still counts as a sample, as in TRL).
        num_samples, num_tokens: totals of the step over all processes, where `lengths` holds a part of them. Under data
            parallelism that averages gradients, divide both by the number of processes.

    Raises:
        ConfigError: unknown loss type, or dr_grpo without max_completion_length.
    """
    _check_choice("loss_type", loss_type, get_args(LossType))
    lengths = lengths.float()
    samples = float(lengths.shape[0] if num_samples is None else num_samples)
    if loss_type == "grpo":
        return samples * lengths.clamp(min=1.0)
    if loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ConfigError("loss_type='dr_grpo' divides by max_completion_length, but none was given; pass it.")
        return torch.full_like(lengths, samples * max_completion_length)
    tokens = float(lengths.sum()) if num_tokens is None else float(num_tokens)
    return torch.full_like(lengths, max(tokens, 1.0))


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    denominators: Tensor,
    sample_ids: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    delta: float | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
    weights: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    mask: Tensor | None = None,
    entropy: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy-gradient loss of R tokens.

    l = -weight · min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A) + beta · k3(reference), r = exp(logprob - old_logprob).

    Args:
        logprobs: [R], differentiable. old_logprobs: [R], of the policy before the first update on this rollout batch.
        advantages, denominators: [N], looked up with sample_ids int64 [R].
        delta: upper bound of r in the unclipped term, which bounds the loss where A < 0 (dual clip); None for none.
        beta: weight of the KL to the reference, estimated as exp(d) - d - 1, d = ref_logprob - logprob.
        use_bias_correction_kl: multiply that estimate by r, which makes its gradient the unbiased one of the reverse KL
            (DeepSeek-V3.2, arXiv 2512.02556; TRL's default); False is the estimate of the original GRPO.
        weights: [R] importance correction of the sampler (see `correction`), without gradient; None is 1. The KL is not weighted.
        mask: bool [R], False drops the token. entropy: [R], only reported.

    Returns:
        The loss (a sum: add those of the micro-batches) and sums over unmasked tokens of this micro-batch, without gradient:
        num_tokens, clipped_low, clipped_high (tokens outside the trust region on the side their advantage pushes to), clipped_dual
        (tokens bounded by delta, where it is set), ratio,
        kl_old (k3 estimate of KL(old ‖ now)), kl_ref and entropy where known, and policy_loss, kl_loss: the two parts of the loss.

    Raises:
        ConfigError: beta without reference log-probs, or delta not above 1 + clip_high.
    """
    if beta != 0.0 and ref_logprobs is None:
        raise ConfigError(f"beta is {beta}, but there are no reference log-probs; pass ref_logprobs or set beta = 0.")
    if delta is not None and delta <= 1.0 + clip_high:
        raise ConfigError(
            f"delta is {delta}; expected more than 1 + clip_high = {1.0 + clip_high}, or None to turn dual clip off."
        )
    keep = torch.ones_like(logprobs) if mask is None else mask.to(logprobs.dtype)
    advantage = advantages.to(logprobs)[sample_ids]
    log_ratio = logprobs - old_logprobs
    if mask is not None:
        # Before exp: a ratio that overflows in a token that does not count must not make 0 · inf.
        log_ratio = log_ratio.masked_fill(~mask.bool(), 0.0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    per_token = -torch.minimum(bounded * advantage, clipped * advantage)
    if weights is not None:
        per_token = per_token * weights
    scale = keep / denominators.to(logprobs)[sample_ids]
    policy_part = (per_token * scale).sum()
    loss = policy_part

    with torch.no_grad():
        sums = {
            "num_tokens": keep.sum(),
            "clipped_low": (keep * ((ratio < 1.0 - clip_low) & (advantage < 0))).sum(),
            "clipped_high": (keep * ((ratio > 1.0 + clip_high) & (advantage > 0))).sum(),
            "ratio": (keep * ratio).sum(),
            "kl_old": (keep * (ratio - 1.0 - log_ratio)).sum(),
            "policy_loss": policy_part.detach(),
        }
        if delta is not None:
            sums["clipped_dual"] = (keep * ((ratio > delta) & (advantage < 0))).sum()
        if entropy is not None:
            sums["entropy"] = (keep * entropy).sum()
    if ref_logprobs is not None:
        distance = ref_logprobs - logprobs
        if mask is not None:
            distance = distance.masked_fill(~mask.bool(), 0.0)
        per_token_kl = distance.exp() - distance - 1.0
        if use_bias_correction_kl:
            per_token_kl = per_token_kl * ratio
        sums["kl_ref"] = (keep * per_token_kl).sum().detach()
        if beta != 0.0:
            kl_part = beta * (per_token_kl * scale).sum()
            sums["kl_loss"] = kl_part.detach()
            loss = loss + kl_part
    return loss, sums


def completion_mask(finish_reasons: list[str], sample_ids: Tensor, mask_truncated_completions: bool) -> Tensor:
    """Mask bool [R]: False for tokens of completions cut at the length limit, if those are to be left out."""
    keep = torch.tensor(
        [not mask_truncated_completions or reason == "stop" for reason in finish_reasons], dtype=torch.bool
    )
    return keep.to(sample_ids.device)[sample_ids]


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; expected one of {', '.join(choices)}.")
