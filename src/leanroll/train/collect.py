"""The first half of a step: choose prompts, roll out, score, keep the groups that teach something."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from leanroll.config import RLConfig
from leanroll.errors import ConfigError, RolloutError
from leanroll.losses.policy import advantages, most_varied
from leanroll.rollout.engine import RolloutEngine
from leanroll.tasks import Task, TaskItem
from leanroll.tasks.rewards import RewardRunner
from leanroll.train.evaluation import score_groups
from leanroll.train.progress import RunDisplay
from leanroll.train.prompts import PromptOrder
from leanroll.train.setup import PromptEncoder
from leanroll.train.update import TrainingGroup
from leanroll.types import Prompt, RolloutGroup, SamplingParams

_LOG = logging.getLogger(__name__)

OVERLONG = "overlong"
"""Name under which the penalty for length is logged beside the rewards."""

_EQUAL = 1e-8
"""Rewards of a group that differ by less are equal: their advantage would be rounding noise divided by epsilon."""


@dataclass(frozen=True, slots=True)
class RLBatch:
    """What a step trains on and what it was chosen from.

    training: groups for the loss, without missing samples. sampled: all groups of the step, resampled ones included.
    rewards: total reward per sampled group and sample, float64 [P, G], NaN where missing. by_reward: the same by name.
    """

    training: tuple[TrainingGroup, ...]
    sampled: tuple[RolloutGroup, ...]
    rewards: np.ndarray
    by_reward: dict[str, np.ndarray]
    metrics: dict[str, float]

    def records(self, limit: int) -> Iterator[dict[str, Any]]:
        """The first completions, as they are written to rollouts/step-NNNNNN.jsonl: whole groups up to about
        `limit`."""
        count = 0
        for g, group in enumerate(self.sampled):
            if count >= limit:
                return
            for r in group.rollouts:
                count += 1
                total = self.rewards[g, r.sample_index]
                yield {
                    "prompt_index": group.prompt.index,
                    "sample_index": r.sample_index,
                    "prompt": group.prompt.text,
                    "completion": r.text,
                    "reward": None if np.isnan(total) else float(total),
                    "rewards": {
                        name: float(values[g, r.sample_index])
                        for name, values in self.by_reward.items()
                        if not np.isnan(values[g, r.sample_index])
                    },
                    "length": len(r.token_ids),
                    "finish_reason": r.finish_reason,
                    "kv_share_read": r.pages_read / r.pages_total if r.pages_total else 1.0,
                    "weights_version": r.weights_version,
                }


class Collector:
    """Makes the batch of a step. Everything random in it is keyed by (seed, step), so it has no state."""

    def __init__(
        self,
        config: RLConfig,
        task: Task,
        encoder: PromptEncoder,
        engine: RolloutEngine,
        rewards: RewardRunner,
        sampling: SamplingParams,
        display: RunDisplay,
    ) -> None:
        self._config, self._task, self._encoder, self._engine = config, task, encoder, engine
        self._rewards, self._sampling, self._display = rewards, sampling, display
        rl = config.rl
        self._rounds = 1 + (rl.resample_zero_std if rl.filter_zero_std else 0)
        self._order = PromptOrder(task.num_train, rl.prompts_per_step, self._rounds, config.train.seed)

    def check(self, step: int) -> None:
        """Raise the ConfigError that `collect` would raise before it samples anything; for before a run directory is made."""
        self._engine.check(self._prompts(self._items(step, 0)), self._sampling)

    def collect(self, step: int) -> RLBatch:
        """Roll out rounds of prompts until enough groups have rewards that differ, or the rounds are used up.

        Raises:
            RolloutError: no completion of the step could be generated and scored.
            ConfigError: a prompt with the longest completion does not fit a micro-batch.
        """
        rl = self._config.rl
        training: list[TrainingGroup] = []
        groups: list[RolloutGroup] = []
        totals: list[np.ndarray] = []
        by_name: list[dict[str, np.ndarray]] = []
        failures = 0
        for round_ in range(self._rounds):
            new, total, by_reward, failed = self._roll_out(step, self._items(step, round_))
            groups += new
            totals.append(total)
            by_name.append(by_reward)
            failures += failed
            training += self._choose(new, total)
            if len(training) >= rl.prompts_per_step:
                break
        rewards = np.concatenate(totals)
        if not np.isfinite(rewards).any():
            reasons = [f.reason for g in groups for f in g.failures]
            raise RolloutError(
                f"Step {step}: none of its {rewards.size} completions could be generated and scored. "
                f"{'First reason: ' + reasons[0] if reasons else 'All rewards failed and were dropped.'}"
            )
        training = training[: rl.prompts_per_step]
        names = {name: np.concatenate([part[name] for part in by_name]) for name in by_name[0]}
        metrics = _metrics(groups, rewards, names, training)
        metrics["reward_errors"] = failures
        metrics["tokens_per_second"] = metrics["generated_tokens"] / self._display.clock.seconds["rollout"]
        return RLBatch(tuple(training), tuple(groups), rewards, names, metrics)

    def _items(self, step: int, round_: int) -> list[TaskItem]:
        return [self._task.train_item(i) for i in self._order.indices(step, round_)]

    def _prompts(self, items: Sequence[TaskItem]) -> list[Prompt]:
        prompts = self._encoder.encode(items)
        _check_lengths(prompts, self._config)
        return prompts

    def _roll_out(
        self, step: int, items: Sequence[TaskItem]
    ) -> tuple[list[RolloutGroup], np.ndarray, dict[str, np.ndarray], int]:
        prompts = self._prompts(items)
        num = self._config.rl.num_generations
        with self._display.phase("rollout", total=len(items) * num):
            groups = self._engine.generate(prompts, self._sampling, num, step=step, progress=self._display.show_rollout)
        for failure in [f for g in groups for f in g.failures]:
            _LOG.warning("Step %d, prompt %d: %s", step, failure.prompt_index, failure.reason)
        with self._display.phase("reward"):
            total, by_reward, failed = score_groups(self._rewards, items, groups, num)
            if self._config.rl.overlong_buffer:
                by_reward[OVERLONG] = np.where(np.isnan(total), np.nan, self._overlong(groups, total.shape))
                total = total + by_reward[OVERLONG]
        return groups, total, by_reward, failed

    def _overlong(self, groups: Sequence[RolloutGroup], shape: tuple[int, ...]) -> np.ndarray:
        """Penalty per group and sample: 0 up to the buffer, then linear in the length."""
        rl, most = self._config.rl, self._config.rollout.max_completion_length
        penalties = np.zeros(shape)
        for g, group in enumerate(groups):
            for r in group.rollouts:
                inside = len(r.token_ids) - (most - rl.overlong_buffer)
                penalties[g, r.sample_index] = -rl.overlong_penalty * min(max(inside / rl.overlong_buffer, 0.0), 1.0)
        return penalties

    def _choose(self, groups: Sequence[RolloutGroup], totals: np.ndarray) -> list[TrainingGroup]:
        """Groups that enter the loss, without missing samples. A group with fewer than two samples has no baseline."""
        rl = self._config.rl
        if rl.train_generations:
            totals = most_varied(totals, rl.train_generations)
        values = advantages(totals, rl.scale_rewards)
        chosen: list[TrainingGroup] = []
        for group, row, total in zip(groups, values, totals, strict=True):
            kept = [r for r in group.rollouts if np.isfinite(total[r.sample_index])]
            if len(kept) < 2 or (rl.filter_zero_std and _all_equal(total)):
                continue
            chosen.append(TrainingGroup(replace(group, rollouts=tuple(kept)), row[[r.sample_index for r in kept]]))
        return chosen


def _check_lengths(prompts: Sequence[Prompt], config: RLConfig) -> None:
    """Raise before sampling what a micro-batch could not hold, not after, when a completion first happens to be long."""
    longest = max((len(p.token_ids) for p in prompts), default=1)
    # The last token of a completion is predicted, not fed.
    need = longest + config.rollout.max_completion_length - 1
    if need > config.train.micro_batch_tokens:
        raise ConfigError(
            f"train.micro_batch_tokens is {config.train.micro_batch_tokens}, but a prompt of {longest} tokens with "
            f"rollout.max_completion_length = {config.rollout.max_completion_length} can take {need}; raise the former or "
            "lower the latter."
        )


def _all_equal(row: np.ndarray) -> bool:
    present = row[np.isfinite(row)]
    return present.size == 0 or float(np.ptp(present)) < _EQUAL


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Counts and lengths of a step's rollouts, at least one (names and units: `leanroll.rundir_metrics`)."""
    rollouts = [r for g in groups for r in g.rollouts]
    lengths = np.array([len(r.token_ids) for r in rollouts])
    held = sum(r.pages_total for r in rollouts)
    return {
        "prompts": len(groups),
        "completions": len(rollouts),
        "generated_tokens": int(lengths.sum()),
        "completion_length/mean": float(lengths.mean()),
        "completion_length/p50": float(np.median(lengths)),
        "completion_length/min": int(lengths.min()),
        "completion_length/max": int(lengths.max()),
        "prompt_length/mean": float(np.mean([len(g.prompt.token_ids) for g in groups])),
        "truncated_share": float(np.mean([r.finish_reason == "length" for r in rollouts])),
        "kv_share_read": sum(r.pages_read for r in rollouts) / held if held else 1.0,
    }


def _metrics(
    groups: Sequence[RolloutGroup],
    rewards: np.ndarray,
    by_reward: dict[str, np.ndarray],
    training: Sequence[TrainingGroup],
) -> dict[str, float]:
    present = rewards[np.isfinite(rewards)]
    stds = [float(np.std(row[np.isfinite(row)], ddof=1)) for row in rewards if np.isfinite(row).sum() > 1]
    metrics = rollout_metrics(groups) | {
        "trained_groups": len(training),
        "reward/mean": float(present.mean()),
        "reward/min": float(present.min()),
        "reward/max": float(present.max()),
        "dropped_completions": int(rewards.size - present.size),
        "zero_std_share": float(np.mean([_all_equal(row) for row in rewards])),
    }
    if stds:
        metrics["reward/std"] = float(np.mean(stds))
    for name, values in by_reward.items():
        metrics[f"reward/{name}"] = float(np.nanmean(values))
    if training:
        metrics["advantage/std"] = float(np.std(np.concatenate([g.advantages for g in training])))
    return metrics
