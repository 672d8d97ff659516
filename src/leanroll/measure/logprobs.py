"""Teacher-forced log-probs of rollouts: dense or sparse, in packed micro-batches, each prompt computed once.

Example:
    batches = pack(groups, max_tokens)
    scores = batch_logprobs(policy, batches[0], temperature=1.0)      # TokenScores, flat [R], differentiable
    scores = score(policy, groups, temperature=1.0, max_tokens=8192)  # per rollout, packed and streamed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from leanroll.measure.context import PackedContext
from leanroll.measure.head import (
    Head,
    Support,
    TokenScores,
    acceptance_rates,
    gather_logprobs,
    token_logprobs,
    top_logprobs,
)
from leanroll.measure.packing import PackedBatch, pack
from leanroll.measure.selection import SparsePlan
from leanroll.types import RolloutGroup

__all__ = [
    "RolloutScores",
    "ScoringPolicy",
    "acceptance_rates",
    "batch_hidden",
    "batch_logprobs",
    "batch_support",
    "gather_logprobs",
    "hidden_states",
    "score",
    "split_by_sample",
    "token_logprobs",
    "top_logprobs",
]


class ScoringPolicy(Protocol):
    """The part of `Policy` that scoring needs."""

    @property
    def head(self) -> Any:
        """The `Head`."""
        ...

    @property
    def device(self) -> Any:
        """Where the model lives."""
        ...

    def hidden(self, input_ids: Tensor, position_ids: Tensor, ctx: Any) -> Tensor:
        """[B, T] → last hidden states [B, T, H]."""
        ...


@dataclass(frozen=True, slots=True)
class RolloutScores:
    """Per rollout, in the order of the flattened groups: tensors with one value per completion token."""

    logprobs: tuple[Tensor, ...]
    entropies: tuple[Tensor, ...]


def batch_hidden(policy: ScoringPolicy, batch: PackedBatch, plan: SparsePlan | None = None) -> Tensor:
    """Hidden states that predict the completion tokens of a batch, [R, H]. The batch may lie on another device."""
    here = batch.to(policy.device)
    hidden = policy.hidden(here.input_ids, here.position_ids, PackedContext(here, plan))
    return hidden[0].index_select(0, here.rows)


@torch.no_grad()
def each_hidden(
    policy: ScoringPolicy, groups: Sequence[RolloutGroup], max_tokens: int
) -> Iterator[tuple[PackedBatch, Tensor]]:
    """Micro-batches with the dense hidden states [R, H] that predict their completion tokens.

    max_tokens: inputs per forward; more where one sequence alone is longer. Each prompt is computed once for its group.
    """
    longest = max(
        (len(g.prompt.token_ids) + len(r.token_ids) - 1 for g in groups for r in g.rollouts), default=max_tokens
    )
    for batch in pack(groups, max(max_tokens, longest)):
        yield batch, batch_hidden(policy, batch)


def hidden_states(policy: ScoringPolicy, groups: Sequence[RolloutGroup], max_tokens: int) -> tuple[Tensor, ...]:
    """The same per rollout of the flattened groups: [T, H] each, in the policy's dtype."""
    states: dict[int, Tensor] = {}
    for batch, hidden in each_hidden(policy, groups, max_tokens):
        states |= split_by_sample(hidden, batch)
    return tuple(states[sample] for sample in sorted(states))


def batch_logprobs(
    policy: ScoringPolicy,
    batch: PackedBatch,
    *,
    temperature: float,
    plan: SparsePlan | None = None,
    with_entropy: bool = False,
    truncated: bool = True,
) -> TokenScores:
    """Log-probs of a packed batch's tokens, flat [R] like `batch.targets`, on the policy's device; differentiable.

    truncated: where a rollout recorded the support of a truncating sampler, renormalise on it (the distribution that was
        drawn from); False gives the untruncated policy.
    """
    hidden = batch_hidden(policy, batch, plan)
    head: Head = policy.head
    support = batch_support(batch, hidden.device) if truncated else None
    targets = batch.targets.to(hidden.device)
    return token_logprobs(hidden, head, targets, temperature, with_entropy=with_entropy, support=support)


def batch_support(batch: PackedBatch, device: torch.device | str) -> Support | None:
    """The recorded supports along the R axis, or None if no rollout of the batch was truncated."""
    supports = [batch.rollouts[s].support if s in batch.rollouts else None for s in batch.samples]
    if all(s is None for s in supports):
        return None
    lengths = torch.bincount(batch.sample_ids.cpu(), minlength=max(batch.samples) + 1)
    rows: list[np.ndarray | None] = []
    for sample, support in zip(batch.samples, supports, strict=True):
        rows += [None] * int(lengths[sample]) if support is None else list(support)
    return Support.of(rows, device)


def score(
    policy: ScoringPolicy,
    groups: Sequence[RolloutGroup],
    *,
    temperature: float,
    max_tokens: int,
    plan: SparsePlan | None = None,
    with_entropy: bool = True,
    truncated: bool = True,
    grad: bool = False,
) -> RolloutScores:
    """Score rollouts in micro-batches of at most `max_tokens` input tokens.

    grad: keep the graph of all micro-batches (small inputs only; a trainer runs `batch_logprobs` and backward per batch).
    with_entropy: also the entropy of every token's distribution; otherwise `entropies` is empty.

    Raises:
        ConfigError: a sequence is longer than `max_tokens`, or the temperature is not positive.
    """
    logprobs: dict[int, Tensor] = {}
    entropies: dict[int, Tensor] = {}
    with torch.set_grad_enabled(grad):
        for batch in pack(groups, max_tokens):
            scores = batch_logprobs(
                policy, batch, temperature=temperature, plan=plan, with_entropy=with_entropy, truncated=truncated
            )
            logprobs |= split_by_sample(scores.logprobs, batch)
            if scores.entropy is not None:
                entropies |= split_by_sample(scores.entropy, batch)
    return RolloutScores(tuple(logprobs[s] for s in sorted(logprobs)), tuple(entropies[s] for s in sorted(entropies)))


def split_by_sample(values: Tensor, batch: PackedBatch) -> dict[int, Tensor]:
    """Cut a flat [R] tensor of the batch into one tensor per sample id."""
    lengths = torch.unique_consecutive(batch.sample_ids.cpu(), return_counts=True)[1].tolist()
    return dict(zip(batch.samples, values.split(lengths), strict=True))
