"""`leanroll eval`: mean@k, pass@k and maj@k of a model on a task, with bootstrap intervals."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from leanroll.cli.output import check_output, remark
from leanroll.cli.progress import generation_progress, status
from leanroll.cli.prompts import check_lengths, task_items
from leanroll.config import EvaluateConfig, load_config, to_dict
from leanroll.environment import describe
from leanroll.errors import ConfigError
from leanroll.rundir import write_json, write_jsonl

if TYPE_CHECKING:
    from leanroll.tasks import Task
    from leanroll.train.evaluation import Evaluation

HELP = "Evaluate a model on a task: mean@k, pass@k and maj@k with 95 % bootstrap intervals over prompts."
SCHEMA = EvaluateConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments besides the options of the recipe."""
    parser.add_argument("recipe", nargs="?", help="TOML file; tables that only training uses are left aside")
    parser.add_argument(
        "--output", "-o", metavar="FILE", help="JSON file for the whole result, replaced when all is done"
    )
    parser.add_argument(
        "--completions", metavar="FILE", help="JSON-lines file for the completions with their rewards, one per line"
    )


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    """Evaluate; returns the exit code."""
    config = load_config(EvaluateConfig, arguments.recipe, overrides)
    output = check_output(arguments.output) if arguments.output is not None else None
    completions = None
    if arguments.completions is not None:
        completions = check_output(arguments.completions, "--completions")
        if completions == output:
            raise ConfigError(f"--output and --completions are both {arguments.output!r}; give each a file of its own.")

    from leanroll.train import setup
    from leanroll.train.evaluation import evaluate

    schedule = setup.build_schedule(config.rollout)
    remark(setup.check_sampler(schedule, config.sampler_adapter))
    task = setup.build_task(config.task)
    items = task_items(task, config.eval.split, config.eval.num_prompts, "eval.num_prompts")
    with status(f"Loading {config.model.name} …"):
        policy = setup.build_policy(config.model, config.adapter, training=False)
        setup.load_sampler(policy, config.sampler_adapter)
        engine = setup.build_engine(policy, schedule, config.rollout)
    prompts = setup.PromptEncoder(policy, config.task).encode(items)
    sampling = setup.eval_sampling(policy, config.rollout, config.eval)
    check_lengths(prompts, sampling.max_completion_length, policy.spec.max_position)
    with setup.build_rewards(config.task, task) as rewards:
        rewards.start()
        with generation_progress("completions") as progress:
            result = evaluate(engine, rewards, items, prompts, sampling, config.eval.num_samples, progress=progress)

    scores = score(task, result)
    record = {
        "task": task.name,
        "split": config.eval.split,
        "scores": scores,
        **result.to_json(),
        "config": to_dict(config),
        "environment": describe({"device": str(policy.device), "kernel": engine.backend.name}),
    }
    if output is not None:
        write_json(output, record)
    if completions is not None:
        write_jsonl(completions, completion_records(result))
    _print(record)
    missing = record["missing"]
    if missing:
        failures = [failure for group in result.groups for failure in group.failures]
        reason = failures[0].reason if failures else "their rewards failed (task.on_reward_error is 'drop')"
        raise ConfigError(f"{missing} of {result.rewards.size} completions have no reward and are left out: {reason}")
    return 0


def completion_records(result: Evaluation) -> Iterator[dict[str, Any]]:
    """One JSON-ready record per completion, prompts in order; a reward that failed is null. Those that could not be generated are
    left out."""

    def known(value: float) -> float | None:
        return None if math.isnan(value) else float(value)

    for row, group in enumerate(result.groups):
        for rollout in group.rollouts:
            place = row, rollout.sample_index
            yield {
                "prompt_index": rollout.prompt_index,
                "sample_index": rollout.sample_index,
                "prompt": group.prompt.text,
                "completion": rollout.text,
                "reward": known(result.rewards[place]),
                "rewards": {name: known(values[place]) for name, values in result.by_reward.items()},
                "finish_reason": rollout.finish_reason,
                "length": len(rollout.token_ids),
            }


def score(task: Task, result: Evaluation) -> dict[str, dict[str, float]]:
    """mean@k, pass@1 … pass@k (powers of two) and maj@k → {mean, low, high} of 95 % bootstrap intervals over prompts.

    A missing completion counts as wrong in pass@k and does not count in mean@k. maj@k is left out where the task's answers
    cannot be voted on.
    """
    import numpy as np

    from leanroll.tasks.metrics import bootstrap_mean, maj_at_k, mean_at_k, pass_at_k

    rewards = result.rewards
    num_prompts, k = rewards.shape
    correct = np.array([[not np.isnan(r) and task.correct(float(r)) for r in row] for row in rewards], dtype=bool)
    per_prompt = {f"mean@{k}": mean_at_k(rewards)}
    tries = sorted({k, *(2**i for i in range(k.bit_length()) if 2**i <= k)})
    for n in tries:
        per_prompt[f"pass@{n}"] = pass_at_k(correct, n)
    texts = [[""] * k for _ in range(num_prompts)]
    for row, group in enumerate(result.groups):
        for rollout in group.rollouts:
            texts[row][rollout.sample_index] = rollout.text
    if k > 1 and any(task.answer_key(text) is not None for row in texts for text in row):
        per_prompt[f"maj@{k}"] = maj_at_k(texts, rewards, task.answer_key)
    scores = {}
    for name, values in per_prompt.items():
        interval = bootstrap_mean(values)
        if np.isnan(interval.mean):
            raise ConfigError("No completion has a reward, so there is nothing to report; see the messages above.")
        scores[name] = {"mean": interval.mean, "low": interval.low, "high": interval.high}
    return scores


def _print(record: dict[str, Any]) -> None:
    console = Console()
    table = Table(
        title=f"{record['task']} ({record['split']}), {record['num_prompts']} prompts × {record['num_samples']}"
    )
    for column in ("score", "mean", "95 % interval"):
        table.add_column(column, justify="left" if column == "score" else "right")
    for name, value in record["scores"].items():
        table.add_row(name, f"{value['mean']:.3f}", f"{value['low']:.3f} … {value['high']:.3f}")
    for name, value in record["rewards"].items():
        table.add_row(f"reward {name}", f"{value:.3f}", "")
    console.print(table)
    for column, rows in record["tables"].items():
        breakdown = Table(title=f"by {column}")
        breakdown.add_column(column)
        breakdown.add_column("mean reward", justify="right")
        breakdown.add_column("prompts", justify="right")
        for key, row in rows.items():
            breakdown.add_row(key, f"{row['mean_reward']:.3f}", str(row["num_prompts"]))
        console.print(breakdown)
    console.print(f"mean length {record['mean_length']:.0f} tokens, truncated {record['truncated_share']:.1%}")
