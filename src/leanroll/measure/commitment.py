"""What a model commits to where it disagrees most with the teacher (D6 of early-stopped rollouts, arXiv 2605.27028)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from leanroll.errors import ConfigError, UserError

TOP_SHARE = 0.10
"""Share of tokens with the highest KL at which commitment is read (paper)."""
_SLACK = 1e-12


@dataclass(frozen=True, slots=True)
class TokenScores:
    """One model on tokens of fixed rollouts, [T] each.

    kl: reverse KL, nats. top1: the student's largest probability. teacher_rank: of that token under the teacher, 1 the likeliest.
    """

    kl: np.ndarray
    top1: np.ndarray
    teacher_rank: np.ndarray


@dataclass(frozen=True, slots=True)
class Commitment:
    """At `num_positions` positions: the student's mean top-1 probability, and the shares of its argmax by the teacher's rank."""

    num_positions: int
    top1: float
    rank_1: float
    rank_2_to_5: float
    rank_above_5: float


@dataclass(frozen=True, slots=True)
class ModelCommitment:
    """own: at the model's own highest-KL positions. common: at positions that are the same for all models compared."""

    own: Commitment
    common: Commitment


def commitment(
    models: Mapping[str, TokenScores], *, top_share: float = TOP_SHARE, common: np.ndarray | None = None
) -> dict[str, ModelCommitment]:
    """How far each model commits to modes that the teacher ranks low, where they disagree most (D6).

    A model's own positions move with training, so its numbers there can change without any prediction changing; the common ones
    separate the two.

    Args:
        models: by name, scored on the same tokens of the same rollouts.
        top_share: of the tokens, in (0, 1]; at least one is taken, and the earlier token on a tie.
        common: bool [T], the common positions. None: those with the highest KL averaged over the models, so that no model's
            extremes choose them.

    Raises:
        ConfigError: top_share out of range.
        UserError: no models or tokens, arrays of different lengths, ranks below 1, no common position.
    """
    if not 0.0 < top_share <= 1.0:
        raise ConfigError(f"top_share is {top_share}; expected a share of the tokens above 0 and at most 1.")
    if not models:
        raise UserError("There are no models; expected at least one set of token scores.")
    num_tokens = len(next(iter(models.values())).kl)
    for name, scores in models.items():
        shapes = [np.shape(x) for x in (scores.kl, scores.top1, scores.teacher_rank)]
        if not num_tokens or shapes != [(num_tokens,)] * 3:
            raise UserError(
                f"{name} has kl, top1 and teacher_rank of shapes {shapes}; expected ({num_tokens},) for all, and at least one "
                "token: score every model on the same tokens."
            )
        if not (np.isfinite(scores.kl).all() and np.isfinite(scores.top1).all() and np.min(scores.teacher_rank) >= 1):
            raise UserError(
                f"{name} has a kl or top1 that is not finite, or a teacher rank below 1; expected numbers, and ranks from 1: find "
                "out which token's logits are broken."
            )
    if common is None:
        common = _highest(np.mean([np.asarray(s.kl, dtype=np.float64) for s in models.values()], axis=0), top_share)
    elif common.dtype != bool or common.shape != (num_tokens,) or not common.any():
        raise UserError(
            f"common is {common.dtype} {common.shape} with {int(common.sum())} positions; expected bool ({num_tokens},) with one "
            "or more."
        )
    shared = common
    return {
        name: ModelCommitment(_commitment(s, _highest(s.kl, top_share)), _commitment(s, shared))
        for name, s in models.items()
    }


def _commitment(scores: TokenScores, where: np.ndarray) -> Commitment:
    rank = np.asarray(scores.teacher_rank)[where]
    return Commitment(
        num_positions=len(rank),
        top1=float(np.asarray(scores.top1, dtype=np.float64)[where].mean()),
        rank_1=float((rank == 1).mean()),
        rank_2_to_5=float(((rank > 1) & (rank <= 5)).mean()),
        rank_above_5=float((rank > 5).mean()),
    )


def _highest(values: np.ndarray, share: float) -> np.ndarray:
    """bool [T]: the highest ceil(share · T) values."""
    chosen = np.zeros(len(values), dtype=bool)
    num = int(np.ceil(share * len(values) * (1.0 - _SLACK)))
    chosen[np.argsort(-np.asarray(values), kind="stable")[:num]] = True
    return chosen
