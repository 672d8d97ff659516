"""Exact acceptance of the sampler on a few trajectories of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from leanroll.measure.logprobs import acceptance_rates, batch_hidden
from leanroll.measure.packing import pack
from leanroll.measure.selection import SparsePlan
from leanroll.models import Policy
from leanroll.types import RolloutGroup


def choose_trajectories(groups: Sequence[RolloutGroup], count: int) -> list[RolloutGroup]:
    """About equally many completions of every group, `count` in all: first the first of each group, then the second,
    …"""
    order = sorted((i, g) for g, group in enumerate(groups) for i in range(len(group.rollouts)))[:count]
    picked: dict[int, list[int]] = {}
    for i, g in order:
        picked.setdefault(g, []).append(i)
    return [replace(groups[g], rollouts=tuple(groups[g].rollouts[i] for i in sorted(picked[g]))) for g in sorted(picked)]


@torch.no_grad()
def alpha_metrics(
    policy: Policy,
    groups: Sequence[RolloutGroup],
    plan: SparsePlan,
    *,
    temperature: float,
    max_tokens: int,
    bin_tokens: int,
) -> dict[str, float]:
    """alpha_t = sum_v min(p_t(v), q_t(v)) of every completion token but the first: p the dense policy, q the parallel
    sparse one.

    The first token comes from the dense prefill and would read 1. Bins are by total length, the current token
    included: the length that the budget was looked up with. Untruncated distributions at the sampling temperature.
    """
    alphas: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    for row in pack(groups, max_tokens):
        batch = row.to(policy.device)
        rates = acceptance_rates(
            batch_hidden(policy, batch), policy.head, batch_hidden(policy, batch, plan), policy.head, temperature
        )
        later = (batch.positions > 0).cpu()
        alphas.append(rates.cpu()[later].numpy())
        lengths.append((batch.position_ids[0, batch.rows].cpu()[later] + 1).numpy())
    alpha, length = np.concatenate(alphas), np.concatenate(lengths)
    if alpha.size == 0:
        return {}
    metrics = _summary("alpha/", alpha)
    for start in np.unique(length // bin_tokens) * bin_tokens:
        inside = (length >= start) & (length < start + bin_tokens)
        metrics |= _summary(f"alpha/bin_{start}/", alpha[inside])
    return metrics


def _summary(prefix: str, alpha: np.ndarray) -> dict[str, float]:
    return {
        f"{prefix}p05": float(np.percentile(alpha, 5)),
        f"{prefix}mean": float(alpha.mean()),
        f"{prefix}share_above_0999": float((alpha > 0.999).mean()),
        f"{prefix}tokens": int(alpha.size),
    }
