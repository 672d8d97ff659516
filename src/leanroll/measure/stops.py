"""P(EOS): how likely a policy is to stop, at every token of a completion (D8; arXiv 2605.27028).

Worked example: a completion (11, 12, 2) that stopped by itself with token 2 has three values. The first one is the probability that
the completion ended at once, in place of 11; the last one that of stopping where it did stop.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from leanroll.measure.head import streamed_logprobs
from leanroll.measure.logprobs import ScoringPolicy, each_hidden, split_by_sample
from leanroll.measure.streaming import Head, wide
from leanroll.types import RolloutGroup, SamplingParams


@torch.no_grad()
def stop_probs(hidden: Tensor, head: Head, sampling: SamplingParams, *, chunk_rows: int | None = None) -> Tensor:
    """Probability, before each token is drawn, that any of the stop ids is: hidden states that predict the tokens [R, H] → [R].

    Of softmax(logits / sampling.temperature) over the ids that are not forbidden, before top-k, top-p and min-p cut it; greedy
    sampling, which has no probabilities, is scored at temperature 1. Stop strings do not count. Streamed: never [R, V].

    Args:
        sampling: temperature, stop_token_ids and forbidden_token_ids are read. chunk_rows: rows per chunk; None fits
            `CHUNK_BYTES`.

    Raises:
        UserError: hidden is not [R, H].
    """
    size = head.weight.shape[0]
    stops, forbidden = (
        torch.tensor(sorted(i for i in ids if i < size), dtype=torch.int64, device=hidden.device)
        for ids in (set(sampling.stop_token_ids) - set(sampling.forbidden_token_ids), set(sampling.forbidden_token_ids))
    )
    probs = hidden.new_zeros(hidden.shape[0], dtype=wide(head.weight.dtype))
    for rows, logprobs in streamed_logprobs(hidden, head, sampling.temperature or 1.0, chunk_rows):
        found = logprobs[:, stops].logsumexp(dim=-1)
        if forbidden.numel():
            found -= logprobs.index_fill_(1, forbidden, -torch.inf).logsumexp(dim=-1)
        probs[rows] = found.exp()
    return probs.clamp_(max=1.0)


def rollout_stop_probs(
    policy: ScoringPolicy, groups: Sequence[RolloutGroup], sampling: SamplingParams, max_tokens: int
) -> list[np.ndarray]:
    """`stop_probs` of the dense policy per rollout of the flattened groups, float64 [T] each. One forward over all of them.

    max_tokens: inputs per forward; more where one sequence alone is longer.
    """
    found: dict[int, Tensor] = {}
    for batch, hidden in each_hidden(policy, groups, max_tokens):
        found |= split_by_sample(stop_probs(hidden, policy.head, sampling), batch)
    return [found[sample].cpu().numpy().astype(np.float64) for sample in sorted(found)]


def position_means(values: Sequence[np.ndarray], bin_tokens: int) -> np.ndarray:
    """Mean over all tokens of each bin of `bin_tokens` positions: arrays [T_i], position 0 first → float64 [B]."""
    bins = np.concatenate([np.arange(len(v)) for v in values]) // bin_tokens
    return np.bincount(bins, np.concatenate(values)) / np.bincount(bins)
