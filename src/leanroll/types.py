"""Frozen carriers that pass between the stages. Never imports torch.

Worked example: a prompt of 5 tokens, two samples, the first stopped by itself after 3 tokens.

    Prompt(index=7, token_ids=(1, 9, 4, 4, 2), text="…")
    Rollout(prompt_index=7, sample_index=0, token_ids=(11, 12, 2), logprobs=(-0.1, -2.3, -0.4),
            finish_reason="stop", ...)          # the stop token 2 is part of the completion
    Rollout(prompt_index=7, sample_index=1, token_ids=(11, 8, 8, 8), logprobs=(…4 values…),
            finish_reason="length", ...)        # cut at max_completion_length: no stop token is added

All per-token fields of a Rollout have `len(token_ids)` entries. `logprobs[t]` is the log-probability of
`token_ids[t]` under the very distribution it was drawn from (after temperature and truncation).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, already tokenised.

    index: position in the task's split; part of the key of the random draws.
    columns: everything the task knows about the prompt; passed to reward functions.
    max_completion_length: tokens per completion of this prompt, at most that of the sampling parameters; None: theirs.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    max_completion_length: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are drawn. Order of operations: temperature, then top-k, then top-p, then min-p.

    temperature: 0 means greedy (log-probs are then 0 by definition of the drawn distribution).
    top_k: 0 means off. top_p: 1.0 means off. min_p: 0.0 means off.
    max_completion_length: tokens, the stop token included. A prompt may have a smaller one of its own.
    stop_token_ids: a sampled stop id ends the completion and is kept as its last token.
    stop_strings: the completion ends with the token that completes the string.
    seed: draws are keyed by (seed, step, prompt index, sample index, position).
    num_top_logprobs: 0 means none; otherwise ids and log-probs of the k likeliest tokens per position.
    record_pages: keep the page ids that each token's attention read (for re-scoring).
    forbidden_token_ids: never drawn; log-probs are those of the rest, renormalised. (Not recorded as a support: the rest is nearly
        everything.)
    ignore_stop: never stop before max_completion_length (benchmarks).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_completion_length: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    num_top_logprobs: int = 0
    record_pages: bool = False
    ignore_stop: bool = False
    forbidden_token_ids: tuple[int, ...] = ()

    @property
    def truncates(self) -> bool:
        """True when the sampler can give zero probability to a token that the policy allows."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion. See the module docstring for a worked example.

    pages_read / pages_total: sums over the completion's decode steps, layers and KV heads of pages read and
        pages held, so that their ratio is the share of the KV cache read (dense layers included).
    top_token_ids, top_logprobs: [T, k] arrays, untruncated policy at the sampling temperature.
    support: per token, the ids a truncating sampler could have drawn (None where nothing was truncated).
    pages: [T-1, num_sparse_layers, num_kv_heads, K] int32 logical page ids, -1 padded: entry t was read when
        token t was fed to predict token t+1 (the first token comes from the dense prefill). Dense steps list
        every page.
    weights_version: version of the policy that sampled it.
    """

    prompt_index: int
    sample_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    text: str = ""
    pages_read: int = 0
    pages_total: int = 0
    weights_version: int = 0
    top_token_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    support: tuple[np.ndarray | None, ...] | None = None
    pages: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class RolloutFailure:
    """A sample that could not be generated; the others of its batch are unaffected."""

    prompt_index: int
    sample_index: int
    reason: str


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All samples of one prompt, in sample order."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    failures: tuple[RolloutFailure, ...] = ()
