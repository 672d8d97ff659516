"""The rollout engine and the rewards of a run of several processes: each does its share of the groups, all get all results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from leanroll.rollout.engine import RolloutEngine, RolloutProgress
from leanroll.tasks import TaskItem
from leanroll.tasks.rewards import RewardResult, RewardRunner
from leanroll.train.ranks import Ranks
from leanroll.types import Prompt, RolloutGroup, SamplingParams


class SharedEngine(RolloutEngine):
    """`generate` is called by all ranks with the same prompts. Draws belong to the sequence, so the tokens are those of one
    process. A group travels with all that it records; its prompt does not, since every rank has it."""

    def __init__(self, *args: Any, ranks: Ranks, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ranks = ranks

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        num_samples: int,
        *,
        step: int = 0,
        progress: Callable[[RolloutProgress], None] | None = None,
        allow_none: bool = False,
    ) -> list[RolloutGroup]:
        """As `RolloutEngine.generate`; `progress` is that of the own share."""
        if not allow_none:
            self.check(prompts, sampling)
        generate = super().generate

        def own(share: Sequence[Prompt]) -> list[tuple[Any, Any]]:
            # The own prompts may all fail where others do not.
            groups = generate(share, sampling, num_samples, step=step, progress=progress, allow_none=True)
            return [(group.rollouts, group.failures) for group in groups]

        results = self._ranks.split(prompts, own, "rollouts")
        return [RolloutGroup(prompt, *result) for prompt, result in zip(prompts, results, strict=True)]


class SharedRewards(RewardRunner):
    """`score` is called by all ranks with the same completions; those of one prompt that lie together are scored by one rank."""

    def __init__(self, *args: Any, ranks: Ranks, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ranks = ranks

    def score(
        self,
        items: Sequence[TaskItem],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]] | None = None,
    ) -> RewardResult:
        """As `RewardRunner.score`; `seconds` are those of the slowest rank."""
        starts = [i for i, item in enumerate(items) if i == 0 or item.index != items[i - 1].index]
        own = self._ranks.share(len(starts))
        edges = [*starts, len(items)]
        first, last = edges[own.start], edges[own.stop]
        result = super().score(
            items[first:last],
            completions[first:last],
            None if completion_ids is None else completion_ids[first:last],
        )
        failures = tuple(replace(f, sample=None if f.sample is None else f.sample + first) for f in result.failures)
        return _joined(self._ranks.gather(replace(result, failures=failures), "rewards"))


def _joined(parts: Sequence[RewardResult]) -> RewardResult:
    return RewardResult(
        values={name: np.concatenate([part.values[name] for part in parts]) for name in parts[0].values},
        total=np.concatenate([part.total for part in parts]),
        kept=np.concatenate([part.kept for part in parts]),
        failures=tuple(failure for part in parts for failure in part.failures),
        num_slow_calls=sum(part.num_slow_calls for part in parts),
        seconds=max(part.seconds for part in parts),
    )
