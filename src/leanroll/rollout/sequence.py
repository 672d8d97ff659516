"""State of a prompt and of its samples while an engine runs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from leanroll.types import FinishReason, Prompt, Rollout, RolloutFailure, SamplingParams


def num_pages(length: int, page_size: int) -> int:
    """Pages that `length` tokens occupy."""
    return -(-length // page_size)


@dataclass(slots=True, eq=False)
class PromptState:
    """A prompt on its way through prefill, then the source of its samples.

    limit: tokens per completion at most.
    pages: pages of the prompt, the partial last one included. num_computed: tokens whose KV is in the pool.
    last_hidden: [H], hidden state that predicts the first completion token; None until prefill is done.
    waiting: sample indices that have not started. num_promised: pages reserved for its first sample, so that a
    prefilled prompt
        can always make progress.
    """

    order: int
    prompt: Prompt
    waiting: deque[int]
    limit: int
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_promised: int = 0
    last_hidden: torch.Tensor | None = None
    done: dict[int, Rollout] = field(default_factory=dict)
    failed: list[RolloutFailure] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Prompt tokens."""
        return len(self.prompt.token_ids)

    def num_prompt_pages(self, page_size: int) -> int:
        """Pages of the prompt, a partial last one included."""
        return num_pages(self.length, page_size)

    @classmethod
    def of(cls, order: int, prompt: Prompt, waiting: Iterable[int], sampling: SamplingParams) -> PromptState:
        """With the prompt's own limit, where it has one."""
        own = prompt.max_completion_length
        return cls(order, prompt, deque(waiting), sampling.max_completion_length if own is None else own)

    def num_sample_pages(self, page_size: int) -> int:
        """Pages one sample may need beyond the full pages of the prompt. The last token drawn is never fed back."""
        return num_pages(self.length + self.limit - 1, page_size) - self.length // page_size


@dataclass(slots=True, eq=False)
class SequenceState:
    """One running sample.

    pages: its block table, shared prompt pages first. num_promised: pages of its reservation not taken yet.
    """

    source: PromptState
    sample_index: int
    uniforms: np.ndarray
    pages: list[int]
    num_promised: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_token_ids: list[np.ndarray] = field(default_factory=list)
    top_logprobs: list[np.ndarray] = field(default_factory=list)
    support: list[np.ndarray | None] = field(default_factory=list)
    recorded: list[np.ndarray] = field(default_factory=list)
    pages_read: int = 0
    pages_total: int = 0

    @property
    def length(self) -> int:
        """Tokens of prompt and completion so far."""
        return self.source.length + len(self.token_ids)

    def to_rollout(self, reason: FinishReason, text: str, version: int, params: SamplingParams) -> Rollout:
        """Freeze the finished sequence."""
        return Rollout(
            prompt_index=self.source.prompt.index,
            sample_index=self.sample_index,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=reason,
            text=text,
            pages_read=self.pages_read,
            pages_total=self.pages_total,
            weights_version=version,
            top_token_ids=np.stack(self.top_token_ids) if params.num_top_logprobs else None,
            top_logprobs=np.stack(self.top_logprobs) if params.num_top_logprobs else None,
            support=tuple(self.support) if params.truncates else None,
            pages=_stack_padded(self.recorded) if params.record_pages else None,
        )


def _stack_padded(entries: list[np.ndarray]) -> np.ndarray:
    """Stack [layers, Hk, K_t] arrays of differing K_t to [T, layers, Hk, max K_t], padded with -1."""
    if not entries:
        return np.empty((0, 0, 0, 0), dtype=np.int32)
    width = max(entry.shape[-1] for entry in entries)
    stacked = np.full((len(entries), *entries[0].shape[:-1], width), -1, dtype=np.int32)
    for t, entry in enumerate(entries):
        stacked[t, ..., : entry.shape[-1]] = entry
    return stacked
