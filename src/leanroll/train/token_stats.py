"""Per-token statistics of the loss, collected over micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leanroll.train.mismatch import mismatch_by_position
from leanroll.train.ranks import ALONE, Ranks
from leanroll.types import Rollout


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """What one micro-batch leaves behind, on the CPU. Arrays are [R], R its completion tokens; all tokens, masked or
    not.

    positions: index in the completion. mask: tokens in the loss. could: those and the tokens of completions that were rejected for
    their ratios. sums: the sums of `policy_loss` over unmasked tokens. clipped: of `correction`.
    """

    old: np.ndarray
    sampler: np.ndarray
    logprobs: np.ndarray
    entropy: np.ndarray
    weights: np.ndarray
    mask: np.ndarray
    could: np.ndarray
    sample_ids: np.ndarray
    positions: np.ndarray
    clipped: np.ndarray
    sums: dict[str, float]

    @classmethod
    def of(
        cls,
        *,
        old: Tensor,
        sampler: Tensor,
        logprobs: Tensor,
        entropy: Tensor,
        weights: Tensor | None,
        mask: Tensor,
        could: Tensor,
        sample_ids: Tensor,
        positions: Tensor,
        clipped: Tensor,
        sums: dict[str, Tensor],
    ) -> TokenRecord:
        """From device tensors. weights: None is 1 everywhere."""
        array = lambda t: t.detach().to("cpu", copy=True).numpy()  # noqa: E731
        return cls(
            old=array(old),
            sampler=array(sampler),
            logprobs=array(logprobs),
            entropy=array(entropy),
            weights=array(torch.ones_like(old) if weights is None else weights),
            mask=array(mask),
            could=array(could),
            sample_ids=array(sample_ids),
            positions=array(positions),
            clipped=array(clipped),
            sums={name: float(value) for name, value in sums.items()},
        )

    @classmethod
    def unused(cls, rollouts: Sequence[Rollout], old: Sequence[Tensor], could: Sequence[bool]) -> TokenRecord:
        """Of rollouts that are not trained on; it holds their ratios. old: log-probs [T] of each; could: of each."""
        flat = torch.cat(list(old))
        lengths = torch.tensor([len(r.token_ids) for r in rollouts])
        none = torch.zeros_like(flat)
        return cls.of(
            old=flat,
            sampler=torch.tensor([x for r in rollouts for x in r.logprobs]),
            logprobs=flat,
            entropy=none,
            weights=none,
            mask=none.bool(),
            could=torch.tensor(could).repeat_interleave(lengths),
            sample_ids=torch.arange(len(lengths)).repeat_interleave(lengths),
            positions=torch.cat([torch.arange(int(n)) for n in lengths]),
            clipped=none.bool(),
            sums={},
        )


class TokenStats:
    """Collects the records of a step and turns them into metrics (names and units: `leanroll.rundir_metrics`)."""

    def __init__(self, *, bin_tokens: int, num_passes: int, ranks: Ranks = ALONE) -> None:
        """bin_tokens: width of a bin of positions. num_passes: passes over the batch; each adds every token once. ranks: the
        processes that have the records of a step between them."""
        self._bin_tokens, self._num_passes, self._ranks = bin_tokens, num_passes, ranks
        self._records: list[TokenRecord] = []

    def add(self, record: TokenRecord) -> None:
        """Add a micro-batch."""
        self._records.append(record)

    def metrics(self) -> dict[str, float]:
        """Of the records of all ranks; ratios are those of all tokens that could enter the loss. Empty without any."""
        every = self._ranks.join_lists(self._records, "token statistics")
        records = [r for r in every if r.could.any()]
        if not records:
            return {}
        log_ratio = np.concatenate([(r.old - r.sampler)[r.could] for r in records]).astype(np.float64)
        sequences = np.concatenate([_per_sequence(r) for r in records])
        ratio = np.exp(log_ratio)
        metrics = self._of_the_loss(every) | {
            "ratio/mean": float(ratio.mean()),
            "ratio/min": float(ratio.min()),
            "ratio/max": float(ratio.max()),
            "log_ratio/abs_mean": float(np.abs(log_ratio).mean()),
            "sampler_kl": float((ratio - log_ratio - 1.0).mean()),
        }
        for percent in (1, 5, 50, 95, 99):
            metrics[f"log_ratio/p{percent:02d}"] = float(np.percentile(log_ratio, percent))
        for percent in (1, 50, 99):
            metrics[f"sequence_log_ratio/p{percent:02d}"] = float(np.percentile(sequences, percent))
        positions = np.concatenate([r.positions[r.could] for r in records])
        return metrics | mismatch_by_position(
            log_ratio, positions, bin_tokens=self._bin_tokens, num_passes=self._num_passes
        )

    def _of_the_loss(self, every: Sequence[TokenRecord]) -> dict[str, float]:
        """Of the tokens in the loss; empty without any."""
        records = [r for r in every if r.mask.any()]
        if not records:
            return {}
        total = {key: sum(r.sums.get(key, 0.0) for r in records) for key in records[0].sums}
        tokens = total["num_tokens"]
        metrics = {
            "entropy": total["entropy"] / tokens,
            "clip_share/low": total["clipped_low"] / tokens,
            "clip_share/high": total["clipped_high"] / tokens,
            "policy_ratio/mean": total["ratio"] / tokens,
            "approx_kl": total["kl_old"] / tokens,
            "ratio/weight_mean": float(np.concatenate([r.weights[r.mask] for r in records]).mean()),
            "is_clipped_share": float(np.concatenate([r.clipped[r.mask] for r in records]).mean()),
        }
        if "clipped_dual" in total:
            metrics["clip_share/dual"] = total["clipped_dual"] / tokens
        if "kl_ref" in total:
            metrics["kl_to_ref"] = total["kl_ref"] / tokens
        return metrics


def _per_sequence(record: TokenRecord) -> np.ndarray:
    """Log ratios summed over each completion of the record."""
    ids = record.sample_ids[record.could]
    sums = np.bincount(ids, weights=(record.old - record.sampler)[record.could])
    return sums[np.unique(ids)]
