"""What a step does not train on because it is too far off policy: decided once for the whole rollout batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leanroll.config import AlgorithmConfig
from leanroll.losses.rejection import RatioLimits, Rejection, reject
from leanroll.types import Rollout


@dataclass(frozen=True, slots=True)
class Rejected:
    """One entry per rollout, in order. completions: those left out. outliers: bool [T], tokens whose weight is 0, on the
    log-probs' device. metrics: names and units in `leanroll.rundir_metrics`."""

    completions: tuple[bool, ...]
    outliers: tuple[Tensor, ...]
    metrics: dict[str, float]


def ratio_limits(rl: AlgorithmConfig) -> RatioLimits:
    """The bounds of a recipe."""
    return RatioLimits(
        geo_low=rl.geo_mask_low,
        geo_high=rl.geo_mask_high,
        veto_low=rl.token_veto_low,
        veto_high=rl.token_veto_high,
        m2=rl.m2_threshold,
    )


def reject_rollouts(
    limits: RatioLimits, rollouts: Sequence[Rollout], old: Sequence[Tensor], could: Sequence[bool]
) -> Rejected:
    """Judge a rollout batch of at least one rollout.

    Args:
        old: per rollout, log-probs [T] of the policy before the first update. could: whether each could enter the loss at all.
    """
    lengths = torch.tensor([len(r.token_ids) for r in rollouts])
    sampler = torch.tensor([x for r in rollouts for x in r.logprobs], dtype=torch.float64)
    ids = torch.arange(len(rollouts)).repeat_interleave(lengths)
    log_ratio = torch.cat(list(old)).to("cpu", torch.float64) - sampler
    counted = torch.tensor(could)
    found = reject(log_ratio, ids, len(rollouts), limits, mask=counted[ids])
    outliers = found.outliers.to(old[0].device).split(lengths.tolist())
    return Rejected(tuple(found.sequences.tolist()), outliers, _metrics(found, counted, lengths, limits))


def _metrics(found: Rejection, could: Tensor, lengths: Tensor, limits: RatioLimits) -> dict[str, float]:
    if not could.any():
        return {}
    rejected, number = found.sequences & could, int(could.sum())
    left = int(lengths[could & ~rejected].sum())
    metrics = {
        "rejected_share/completions": int(rejected.sum()) / number,
        "rejected_share/tokens": int(lengths[rejected].sum()) / int(lengths[could].sum()),
        "rejected_share/geo_mean": int((found.by_mean & could).sum()) / number,
        "rejected_share/token_veto": int((found.by_token & could).sum()) / number,
    }
    if limits.m2 is not None and left:
        metrics["m2/masked_share"] = int(found.outliers.sum()) / left
        for name, value in (("before", found.m2_before), ("after", found.m2_after)):
            if value is not None:
                metrics[f"m2/{name}"] = value
    return metrics
