"""Acceptance of the sampler by the policy on a few trajectories of a step, as metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from leanroll.measure.acceptance import AcceptanceStats, acceptance, summarise, tail, top_k_acceptance
from leanroll.measure.selection import SparsePlan
from leanroll.models import Policy
from leanroll.train.ranks import ALONE, Ranks
from leanroll.types import RolloutGroup


def choose_trajectories(groups: Sequence[RolloutGroup], count: int) -> list[RolloutGroup]:
    """About equally many completions of every group, `count` in all: the first of each group, then the second, …

    Completions of one token are left out: their only token comes from the dense prefill.
    """
    order = sorted(
        (i, g) for g, group in enumerate(groups) for i, r in enumerate(group.rollouts) if len(r.token_ids) > 1
    )
    picked: dict[int, list[int]] = {}
    for i, g in order[:count]:
        picked.setdefault(g, []).append(i)
    return [
        replace(groups[g], rollouts=tuple(groups[g].rollouts[i] for i in sorted(picked[g]))) for g in sorted(picked)
    ]


def alpha_metrics(
    policy: Policy,
    groups: Sequence[RolloutGroup],
    plan: SparsePlan,
    *,
    temperature: float,
    max_tokens: int,
    bin_tokens: int,
    with_top_logprobs: bool,
    ranks: Ranks = ALONE,
) -> tuple[dict[str, float], tuple[np.ndarray, ...]]:
    """Exact acceptance as metrics, overall and by bins of total length, and the rates of every rollout, as `acceptance` has them.

    with_top_logprobs adds to the metrics, from recorded top log-probs, bounds on it and the paper's own measure.
    Must run before the weights move away from those that sampled. Empty when there is nothing to measure. ranks: the processes
    that share the groups, the same on all of them.
    """
    if not groups:
        return {}, ()
    exact = partial(acceptance, policy, plan=plan, temperature=temperature, max_tokens=max_tokens)
    rates = tuple(ranks.split(groups, exact, "acceptance"))
    prompt_lengths = [len(g.prompt.token_ids) for g in groups for _ in g.rollouts]
    summary = summarise(rates, prompt_lengths, bin_tokens=bin_tokens)
    metrics = _metrics("alpha/", summary.overall)
    for stats in summary.bins:
        metrics |= _metrics(f"alpha/bin_{stats.low}/", stats)
    if with_top_logprobs:
        top_k = partial(top_k_acceptance, policy, temperature=temperature, max_tokens=max_tokens)
        bounds = ranks.split(groups, top_k, "bounds on acceptance")
        for name, values in (
            ("paper_p05", [b.paper for b in bounds]),
            ("paper_p05_low", [b.low for b in bounds]),
            ("paper_p05_high", [b.high for b in bounds]),
        ):
            metrics[f"alpha/{name}"] = tail(np.concatenate([v[1:] for v in values]))
    return metrics, rates


def _metrics(prefix: str, stats: AcceptanceStats) -> dict[str, float]:
    return {
        f"{prefix}p05": stats.tail,
        f"{prefix}mean": stats.mean,
        f"{prefix}share_above_0999": stats.share_high,
        f"{prefix}tokens": stats.num_tokens,
    }
