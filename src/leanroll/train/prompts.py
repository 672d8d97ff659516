"""Which prompts a step trains on: a pure function of (seed, step, round), so resume needs no iterator state.

Round 0 is the step's batch; rounds 1, 2, … are the extra batches drawn when zero-variance groups are resampled. A
task with endless prompts is read in order from a place of the seed's own. A finite one is read in a fresh seeded
permutation per epoch; the `size mod batch` prompts that do not fill a batch are left out of that epoch, so no prompt
occurs twice in a step.
"""

from __future__ import annotations

import numpy as np

from leanroll.errors import ConfigError

_STRETCH = 2**24
"""Prompts of an endless task that belong to one seed."""


class PromptOrder:
    """Indices into a task's split.

    size: number of prompts, None for an endless task. batch: prompts per round. rounds: batches a step may draw at
    most.
    """

    def __init__(self, size: int | None, batch: int, rounds: int, seed: int) -> None:
        if size is not None and size < batch:
            raise ConfigError(
                f"The task has {size} training prompts, fewer than the {batch} of one step; lower "
                "rl.prompts_per_step or add prompts."
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
