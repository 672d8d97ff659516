"""Which prompts a step trains on: a pure function of (seed, step, round), so resume needs no iterator state.

Round 0 is the step's batch; rounds 1, 2, … are the extra batches drawn when zero-variance groups are resampled. A
task with endless prompts is read in order from a place of the seed's own. A finite one is read in a fresh seeded
permutation per epoch; the `size mod batch` prompts that do not fill a batch are left out of that epoch, so no prompt
occurs twice in a step.

Prompts may also say how many tokens of their completions are wanted (`with_own_limits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from leanroll.errors import ConfigError
from leanroll.tasks import TaskItem
from leanroll.types import Prompt

_STRETCH = 2**24
"""Prompts of an endless task that belong to one seed."""
_SHOWN = 60
"""Characters of a prompt in a message."""


class PromptOrder:
    """Indices into a task's split.

    size: number of prompts, None for an endless task. batch: prompts per round. rounds: batches a step may draw at
    most.
    """

    def __init__(self, size: int | None, batch: int, rounds: int, seed: int) -> None:
        if size is not None and size < batch:
            raise ConfigError(
                f"The task has {size} training prompts, fewer than the {batch} of one step; lower "
                "prompts_per_step or add prompts."
            )
        self.size, self.batch, self.rounds, self.seed = size, batch, rounds, seed

    def indices(self, step: int, round_: int = 0) -> list[int]:
        """Prompt indices of a round of the 1-based `step`; later rounds leave out what earlier ones of the step had."""
        chosen = self._raw(step, round_)
        if self.size is None or round_ == 0:
            return chosen
        earlier = {i for r in range(round_) for i in self._raw(step, r)}
        return [i for i in chosen if i not in earlier]

    def _raw(self, step: int, round_: int) -> list[int]:
        number = (step - 1) * self.rounds + round_
        if self.size is None:
            start = (self.seed % 2**20) * _STRETCH + number * self.batch
            return list(range(start, start + self.batch))
        epoch, position = divmod(number, self.size // self.batch)
        order = np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(self.size)
        return [int(i) for i in order[position * self.batch : (position + 1) * self.batch]]


def largest_own_limit(items: Iterable[TaskItem], full: int) -> int:
    """The largest number of tokens that any of the items, at least one, wants of its completions.

    full: the most that is allowed, rollout.max_completion_length.

    Raises:
        ConfigError: an item does not say, or a number that is not 1 … full.
    """
    return max(_own_limit(item, full) for item in items)


def with_own_limits(
    prompts: Sequence[Prompt], items: Sequence[TaskItem], full: int, max_position: int, micro_batch_tokens: int
) -> list[Prompt]:
    """The prompts of these items, each to be completed with at most the tokens that its item names.

    full: as for `largest_own_limit`. max_position: tokens that the model's context holds. micro_batch_tokens: that a micro-batch
        holds.

    Raises:
        ConfigError: what `largest_own_limit` raises, or prompt and completion do not fit in the context or in a micro-batch.
    """
    found = []
    for prompt, item in zip(prompts, items, strict=True):
        own = _own_limit(item, full)
        if len(prompt.token_ids) + own > max_position:
            raise ConfigError(
                f"{_named(item)} has {len(prompt.token_ids)} tokens and num_tokens = {own}; the model's context holds "
                f"{max_position}. Lower its num_tokens, or shorten it."
            )
        if len(prompt.token_ids) + own - 1 > micro_batch_tokens:
            raise ConfigError(
                f"{_named(item)} has {len(prompt.token_ids)} tokens and num_tokens = {own}, which take "
                f"{len(prompt.token_ids) + own - 1}; a micro-batch must hold them, and train.micro_batch_tokens is "
                f"{micro_batch_tokens}. Raise it, or lower num_tokens."
            )
        found.append(replace(prompt, max_completion_length=own))
    return found


def _own_limit(item: TaskItem, full: int) -> int:
    tokens = item.num_tokens
    if tokens is None:
        raise ConfigError(
            f"distill.per_prompt_tokens is set, but {_named(item, start=False)} does not say its number of tokens; give it one (a "
            "file task: the column `num_tokens`), or set distill.num_tokens for all."
        )
    if not 1 <= tokens <= full:
        raise ConfigError(
            f"{_named(item)} has num_tokens = {tokens}; expected 1 to {full}, the length of a full rollout "
            "(rollout.max_completion_length)."
        )
    return tokens


def _named(item: TaskItem, *, start: bool = True) -> str:
    text = item.prompt if len(item.prompt) <= _SHOWN else f"{item.prompt[:_SHOWN]}…"
    return f"{'T' if start else 't'}raining prompt {item.index} ({text!r})"
