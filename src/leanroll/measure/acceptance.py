"""How far the sampler is from the policy: acceptance rates per token, their tail, and what top-k log-probs can tell.

alpha_t = sum_v min(p_t(v), q_t(v)), p the dense policy, q the sparse sampler; 1 means that the two agree. Its mean hides
what matters: most tokens have alpha > 0.999, and training collapses with the 5th percentile. Source: Sparrow, arXiv 2606.08446.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from leanroll.errors import ConfigError, UserError
from leanroll.measure.head import acceptance_rates, gather_logprobs, top_logprobs
from leanroll.measure.logprobs import ScoringPolicy, batch_hidden, split_by_sample
from leanroll.measure.packing import pack
from leanroll.measure.selection import SparsePlan
from leanroll.types import Rollout, RolloutGroup

TAIL_QUANTILE = 0.05
HIGH_ACCEPTANCE = 0.999
"""Tokens above this are counted as accepted; below it the rates follow a Beta distribution (paper, section 3)."""


@torch.no_grad()
def acceptance(
    policy: ScoringPolicy,
    groups: Sequence[RolloutGroup],
    plan: SparsePlan,
    *,
    temperature: float,
    max_tokens: int,
    sampler: ScoringPolicy | None = None,
) -> tuple[np.ndarray, ...]:
    """Exact alpha of every completion token, per rollout in the order of the flattened groups: float32 [num tokens].

    The sampler's distribution is recomputed by parallel sparse scoring of the same tokens.

    Args:
        sampler: the sparse side, if it is not the same policy (an adapter of its own).
        max_tokens: input tokens of one micro-batch; the final hidden states of both passes are held, never [tokens, vocabulary].
    """
    rates: dict[int, np.ndarray] = {}
    sparse = policy if sampler is None else sampler
    for batch in pack(groups, max_tokens):
        hidden_p = batch_hidden(policy, batch)
        hidden_q = batch_hidden(sparse, batch, plan)
        alpha = acceptance_rates(hidden_p, policy.head, hidden_q, sparse.head, temperature)
        rates |= {s: a.cpu().numpy() for s, a in split_by_sample(alpha, batch).items()}
    return tuple(rates[s] for s in sorted(rates))


@dataclass(frozen=True, slots=True)
class TopKAcceptance:
    """Per token of one rollout, float32 [num tokens]: bounds on alpha, and the paper's own measure of it.

    low, high: low <= alpha <= high. paper: sum of min(p, q) over ids that both have in their top k, a lower bound.
    """

    low: np.ndarray
    high: np.ndarray
    paper: np.ndarray


@torch.no_grad()
def top_k_acceptance(
    policy: ScoringPolicy, groups: Sequence[RolloutGroup], *, temperature: float, max_tokens: int
) -> tuple[TopKAcceptance, ...]:
    """Bounds on alpha from the top log-probs that the sampler recorded (`SamplingParams.num_top_logprobs`), per rollout.

    Needs one dense pass and no sparse one, so it also works for samplers that cannot be re-scored. Bounds are loose on weak models.

    Raises:
        UserError: a rollout has no recorded top log-probs.
    """
    found: dict[int, TopKAcceptance] = {}
    for batch in pack(groups, max_tokens):
        hidden = split_by_sample(batch_hidden(policy, batch), batch)
        for sample, rows in hidden.items():
            rollout = batch.rollouts[sample]
            if rollout.top_token_ids is None or rollout.top_logprobs is None:
                raise UserError(
                    f"sample {sample} has no top log-probs; sample with num_top_logprobs > 0, or measure exact acceptance."
                )
            ids = torch.from_numpy(np.asarray(rollout.top_token_ids, dtype=np.int64)).to(rows.device)
            drawn = torch.tensor(rollout.token_ids, device=rows.device)[:, None]
            log_p = gather_logprobs(rows, policy.head, torch.cat([ids, drawn], dim=1), temperature).cpu().numpy()
            top_p_ids, top_p = top_logprobs(rows, policy.head, ids.shape[1], temperature)
            low, high = bracket(rollout, log_p[:, :-1], log_p[:, -1])
            paper = intersection_acceptance(
                rollout.top_token_ids, rollout.top_logprobs, top_p_ids.cpu().numpy(), top_p.cpu().numpy()
            )
            found[sample] = TopKAcceptance(low, high, paper)
    return tuple(found[s] for s in sorted(found))


def bracket(rollout: Rollout, p_logprobs: np.ndarray, p_drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bounds lo <= alpha <= hi of every token.

    With S = top-k(q) and the drawn token: lo = sum over S of min(p, q), hi = lo + min(1 - p(S), 1 - q(S)).

    Args:
        rollout: with top_token_ids and top_logprobs [T, k] of q. Where the sampler truncated, the drawn token's log-prob is of
            another distribution, so S is then the top k alone.
        p_logprobs: [T, k], log p at top_token_ids. p_drawn: [T], log p at token_ids.
    """
    assert rollout.top_token_ids is not None
    assert rollout.top_logprobs is not None
    p, q = np.exp(p_logprobs.astype(np.float64)), np.exp(rollout.top_logprobs.astype(np.float64))
    extra = ~(rollout.top_token_ids == np.asarray(rollout.token_ids)[:, None]).any(axis=1)
    if rollout.support is not None:
        extra &= np.asarray([kept is None for kept in rollout.support])
    p_extra = np.where(extra, np.exp(p_drawn.astype(np.float64)), 0.0)
    q_extra = np.where(extra, np.exp(np.asarray(rollout.logprobs, dtype=np.float64)), 0.0)
    low = np.minimum(p, q).sum(axis=1) + np.minimum(p_extra, q_extra)
    rest_p, rest_q = 1.0 - p.sum(axis=1) - p_extra, 1.0 - q.sum(axis=1) - q_extra
    high = low + np.maximum(np.minimum(rest_p, rest_q), 0.0)
    return low.astype(np.float32), high.astype(np.float32)


def intersection_acceptance(
    q_ids: np.ndarray, q_logprobs: np.ndarray, p_ids: np.ndarray, p_logprobs: np.ndarray
) -> np.ndarray:
    """The paper's measurement: sum of min(p, q) over the ids in both top-k lists, all [T, k] → float32 [T]."""
    same = q_ids[:, :, None] == p_ids[:, None, :]
    smaller = np.minimum(np.exp(q_logprobs)[:, :, None], np.exp(p_logprobs)[:, None, :])
    return np.where(same, smaller, 0.0).sum(axis=(1, 2)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class AcceptanceStats:
    """Acceptance of tokens predicted when low <= length < high; length is what the budget was looked up with.

    tail: the lowest `quantile` of alpha over tokens (5th percentile). tail_low, tail_high: bootstrap interval of the tail over
    trajectories. share_high: share of tokens with alpha > 0.999.
    """

    low: int
    high: int
    num_tokens: int
    num_rollouts: int
    mean: float
    tail: float
    tail_low: float
    tail_high: float
    share_high: float


@dataclass(frozen=True, slots=True)
class AcceptanceSummary:
    """overall: all lengths. bins: length bins that have tokens, ascending."""

    overall: AcceptanceStats
    bins: tuple[AcceptanceStats, ...]


def summarise(
    rates: Sequence[np.ndarray],
    prompt_lengths: Sequence[int],
    *,
    bin_tokens: int,
    quantile: float = TAIL_QUANTILE,
    confidence: float = 0.9,
    num_resamples: int = 200,
    seed: int = 0,
) -> AcceptanceSummary:
    """Tail, mean and share of accepted tokens, overall and by total length.

    The unit is the token: every token drawn by a sparse step counts once. The first token of a completion is left out, since it
    comes from the dense prefill and always reads 1. Tokens of one rollout are not independent, so the interval comes from
    resampling whole rollouts.

    Args:
        rates: alpha per rollout, first tokens included. prompt_lengths: tokens of each rollout's prompt.
        bin_tokens: width of a length bin.
        confidence: of the interval. num_resamples: bootstrap draws; seed: of the draws.

    Raises:
        ConfigError: no tokens, or a setting out of range.
    """
    if bin_tokens < 1 or not 0.0 < quantile < 1.0 or not 0.0 < confidence < 1.0 or num_resamples < 1:
        raise ConfigError(
            f"bin_tokens={bin_tokens}, quantile={quantile}, confidence={confidence}, num_resamples={num_resamples}; expected at "
            "least one token per bin and one resample, quantile and confidence between 0 and 1."
        )
    later = [r[1:] for r in rates]
    lengths = [len(r) for r in later]
    if not sum(lengths):
        raise ConfigError("There are no tokens to summarise; sample some completions of more than one token first.")
    values = np.concatenate(later).astype(np.float64)
    owners = np.repeat(np.arange(len(rates)), lengths)
    totals = np.concatenate([p + 1 + np.arange(n) for p, n in zip(prompt_lengths, lengths, strict=True)])
    settings = TailSettings(quantile, confidence, num_resamples, seed)
    overall = tail_stats(values, owners, int(totals.min()), int(totals.max()) + 1, settings)
    bins = []
    for index in np.unique(totals // bin_tokens):
        inside = totals // bin_tokens == index
        bins.append(
            tail_stats(values[inside], owners[inside], int(index) * bin_tokens, int(index + 1) * bin_tokens, settings)
        )
    return AcceptanceSummary(overall, tuple(bins))


def tail(values: np.ndarray, quantile: float = TAIL_QUANTILE) -> float:
    """The smallest value that at least a share `quantile` of the values does not exceed."""
    return _weighted_quantile(np.sort(values), np.ones(len(values), dtype=np.int64), quantile)


@dataclass(frozen=True, slots=True)
class TailSettings:
    """quantile: of alpha over tokens. confidence: of its interval. num_resamples: bootstrap draws; seed: of the draws."""

    quantile: float = TAIL_QUANTILE
    confidence: float = 0.9
    num_resamples: int = 200
    seed: int = 0


def tail_stats(
    values: np.ndarray, owners: np.ndarray, low: int, high: int, settings: TailSettings | None = None
) -> AcceptanceStats:
    """Statistics of one length bin [low, high): alpha of its tokens, and the number of the rollout each token is from."""
    s = settings or TailSettings()
    quantile, confidence, num_resamples, seed = s.quantile, s.confidence, s.num_resamples, s.seed
    order = np.argsort(values, kind="stable")
    values = values[order]
    rollouts, owners = np.unique(owners[order], return_inverse=True)
    generator = np.random.default_rng([seed, low, high])
    tails = np.empty(num_resamples)
    for i in range(num_resamples):
        # How often each rollout was drawn is the weight of its tokens; the sorted values need no second sort.
        counts = np.bincount(generator.integers(len(rollouts), size=len(rollouts)), minlength=len(rollouts))
        tails[i] = _weighted_quantile(values, counts[owners], quantile)
    margin = (1.0 - confidence) / 2.0
    tail_low, tail_high = np.quantile(tails, [margin, 1.0 - margin])
    return AcceptanceStats(
        low=low,
        high=high,
        num_tokens=len(values),
        num_rollouts=len(rollouts),
        mean=float(values.mean()),
        tail=tail(values, quantile),
        tail_low=float(tail_low),
        tail_high=float(tail_high),
        share_high=float((values > HIGH_ACCEPTANCE).mean()),
    )


def _weighted_quantile(ascending: np.ndarray, weights: np.ndarray, quantile: float) -> float:
    """Smallest value that at least `quantile` of the weight does not exceed."""
    cumulative = np.cumsum(weights)
    return float(ascending[np.searchsorted(cumulative, quantile * cumulative[-1])])
