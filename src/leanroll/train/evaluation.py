"""Held-out evaluation: mean reward with a bootstrap interval, per reward and per kind of prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from leanroll.errors import RolloutError
from leanroll.rollout.engine import RolloutEngine, RolloutProgress
from leanroll.tasks import TaskItem
from leanroll.tasks.metrics import Interval, bootstrap_mean, mean_at_k
from leanroll.tasks.rewards import RewardRunner
from leanroll.types import Prompt, RolloutGroup, SamplingParams

TABLE_COLUMNS = ("kind", "seen_kind")
"""Columns of task items that an evaluation is broken down by, where the task has them."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Rewards of held-out completions.

    rewards: total reward, float64 [P, k], NaN where a completion is missing (failed rollout, dropped reward).
    by_reward: name → float64 [P, k], before weights.
    groups: the completions, [P].
    """

    items: tuple[TaskItem, ...]
    groups: tuple[RolloutGroup, ...]
    rewards: np.ndarray
    by_reward: dict[str, np.ndarray]

    def interval(self, level: float = 0.95) -> Interval:
        """Mean over prompts of the mean reward of a prompt's samples, with its bootstrap interval over prompts."""
        return bootstrap_mean(mean_at_k(self.rewards), level=level)

    def to_json(self) -> dict[str, Any]:
        """What is written to eval/step-NNNNNN.json: totals, interval, tables, and rewards per prompt for paired
        comparisons."""
        interval = self.interval()
        lengths = [len(r.token_ids) for g in self.groups for r in g.rollouts]
        truncated = [r.finish_reason == "length" for g in self.groups for r in g.rollouts]
        return {
            "mean_reward": interval.mean,
            "low_95": interval.low,
            "high_95": interval.high,
            "num_prompts": len(self.items),
            "num_samples": int(self.rewards.shape[1]),
            "missing": int(np.isnan(self.rewards).sum()),
            "rewards": {name: float(np.nanmean(mean_at_k(values))) for name, values in self.by_reward.items()},
            "mean_length": float(np.mean(lengths)) if lengths else 0.0,
            "truncated_share": float(np.mean(truncated)) if truncated else 0.0,
            "tables": {column: self._table(column) for column in TABLE_COLUMNS if self._has(column)},
            "per_prompt": [
                {
                    "index": item.index,
                    **{c: item.columns[c] for c in TABLE_COLUMNS if c in item.columns},
                    "rewards": [None if np.isnan(x) else float(x) for x in row],
                }
                for item, row in zip(self.items, self.rewards, strict=True)
            ],
        }

    def _has(self, column: str) -> bool:
        return any(column in item.columns for item in self.items)

    def _table(self, column: str) -> dict[str, dict[str, float]]:
        rows: dict[str, list[np.ndarray]] = defaultdict(list)
        for item, rewards in zip(self.items, self.rewards, strict=True):
            rows[str(item.columns.get(column))].append(rewards)
        return {
            key: {"mean_reward": float(np.nanmean(values)), "num_prompts": len(values)}
            for key, values in sorted(rows.items())
            if not np.isnan(values).all()
        }


def evaluate(
    engine: RolloutEngine,
    rewards: RewardRunner,
    items: Sequence[TaskItem],
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    num_samples: int,
    *,
    progress: Callable[[RolloutProgress], None] | None = None,
) -> Evaluation:
    """Complete and score held-out prompts. The draws depend on the sampling seed only, so two policies see the same
    ones.

    items, prompts: [P], the same prompts before and after tokenisation.

    Raises:
        RolloutError: nothing could be generated and scored.
    """
    groups = engine.generate(prompts, sampling, num_samples, progress=progress)
    total, by_reward, _ = score_groups(rewards, items, groups, num_samples)
    if np.isnan(total).all():
        reasons = [f.reason for g in groups for f in g.failures] or ["all rewards failed and were dropped."]
        raise RolloutError(f"No held-out completion could be generated and scored. First reason: {reasons[0]}")
    return Evaluation(tuple(items), tuple(groups), total, by_reward)


def score_groups(
    rewards: RewardRunner, items: Sequence[TaskItem], groups: Sequence[RolloutGroup], num_samples: int
) -> tuple[np.ndarray, dict[str, np.ndarray], int]:
    """Total rewards [P, num_samples], rewards by name, and the number of reward failures; NaN where a sample is
    missing."""
    flat = [(g, r) for g, group in enumerate(groups) for r in group.rollouts]
    result = rewards.score([items[g] for g, _ in flat], [r.text for _, r in flat], [r.token_ids for _, r in flat])
    place = (np.array([g for g, _ in flat], dtype=int), np.array([r.sample_index for _, r in flat], dtype=int))

    def spread(values: np.ndarray) -> np.ndarray:
        full = np.full((len(groups), num_samples), np.nan)
        full[place] = np.where(result.kept, values, np.nan)
        return full

    by_reward = {name: spread(values) for name, values in result.values.items()}
    return spread(result.total), by_reward, len(result.failures)
